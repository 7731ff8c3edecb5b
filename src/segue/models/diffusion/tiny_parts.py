"""Small parts that several families' pipelines have: CLIP's and T5's text encoders with their tokenizers, the VAE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from segue.models.diffusion.library import LIBRARIES, AutoConfig
from segue.models.diffusion.tiny import randomise, scale_to
from segue.models.tiny.files import CORPUS

CLIP_VOCAB = 768
"""The last two are the begin and the end."""
T5_VOCAB = 768
CLIP_WIDTH = 32
T5_WIDTH = 64
_BEGIN, _END = "<|startoftext|>", "<|endoftext|>"
_PIXEL_STD = 0.5
"""In [-1, 1]."""


def write_clip_tokenizer(directory: Path, *, pad: str = _END) -> None:
    """BPE on lower-cased words, as CLIP has it; `pad`: the library's second one is filled with "!"."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # given in order, as the trainer would number what ends a word as it comes; and so has the published one
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=CLIP_VOCAB - 2,
        special_tokens=[*letters, *(f"{letter}</w>" for letter in letters)],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train([str(CORPUS)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = {**model["vocab"], _BEGIN: CLIP_VOCAB - 2, _END: CLIP_VOCAB - 1}
    if sorted(vocab.values()) != list(range(CLIP_VOCAB)):
        raise RuntimeError(f"the corpus gives {len(vocab)} tokens, not {CLIP_VOCAB}")
    merges = [tuple(pair) for pair in model["merges"]]
    made = LIBRARIES["transformers"].CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad, model_max_length=77)
    made.save_pretrained(directory)
    made.backend_tokenizer.model.save(str(directory))


def write_t5_tokenizer(directory: Path, *, longest: int = 512) -> None:
    """A unigram model of words' parts; a part's score falls with its rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ("<pad>", "</s>", "<unk>")
    tokenizer.train([str(CORPUS)], trainers.BpeTrainer(vocab_size=T5_VOCAB - len(special), show_progress=False))
    parts = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    vocab = [(token, 0.0) for token in special]
    vocab += [(part, -5.0 - rank / len(parts)) for rank, part in enumerate(parts)]
    kind = LIBRARIES["transformers"].T5Tokenizer
    kind(vocab=vocab, extra_ids=0, model_max_length=longest).save_pretrained(directory)


def write_clip(directory: Path, seed: int, *, projected: bool, width: int = CLIP_WIDTH) -> None:
    """A text encoder of `width`, its projection (if any) of the same."""
    config = AutoConfig.for_model(
        "clip_text_model",
        vocab_size=CLIP_VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=width,
        bos_token_id=CLIP_VOCAB - 2,
        eos_token_id=CLIP_VOCAB - 1,
        pad_token_id=CLIP_VOCAB - 1,
    )
    transformers = LIBRARIES["transformers"]
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    model = kind(config).eval()
    randomise(model, seed, {r"\.[qk]_proj\.": 2.0, r"\.out_proj\.": 3.0})
    model.save_pretrained(directory)


def write_t5(directory: Path, seed: int, *, width: int = T5_WIDTH) -> None:
    """An encoder of `width`."""
    config = AutoConfig.for_model(
        "t5",
        vocab_size=T5_VOCAB,
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = LIBRARIES["transformers"].T5EncoderModel(config).eval()
    # T5 does not divide by the root of a head's width; padding is seen, so the words have to be loud
    randomise(model, seed, {r"\.[qk]\.": 0.6, "relative_attention_bias": 0.5, r"\.o\.": 2.0})
    model.save_pretrained(directory)


def write_kl_vae(directory: Path, seed: int, *, channels: int = 16, **config: Any) -> None:
    """A VAE of 8 pixels per latent; `config`: scaling and the like."""
    settings: Mapping[str, Any] = {
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": channels,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        **config,
    }
    vae = LIBRARIES["diffusers"].AutoencoderKL(**settings)
    vae.eval()
    randomise(vae, seed)
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, channels, 8, 8, generator=generator) / vae.config.scaling_factor
    pictures = torch.rand(2, 3, 64, 64, generator=generator) * 2 - 1
    scale_to(_PIXEL_STD, vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0])
    # of what is encoded, the mean; the variance is small
    scale_to(1 / vae.config.scaling_factor, vae.encoder.conv_out, lambda: vae.encoder(pictures)[:, :channels])
    with torch.no_grad():
        vae.encoder.conv_out.weight[channels:] *= 0.1
        vae.encoder.conv_out.bias[channels:] = -4.0
    vae.save_pretrained(directory)
