"""Small parts that several families' pipelines have: CLIP's and T5's text encoders with their tokenizers, the VAE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from segue.models.diffusion.library import LIBRARIES, AutoConfig
from segue.models.diffusion.tiny import randomise, scale_to, write_tokenizer
from segue.models.diffusion.tiny_clip import END, make_clip, write_clip_tokenizer
from segue.models.tiny.files import CORPUS, train_tokenizer

T5_VOCAB = 768
CLIP_WIDTH = 32
T5_WIDTH = 64
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Of a Qwen 3 that reads prompts."""
JOINT_GAINS: Mapping[str, float] = {
    r"\.norm_(added_)?[qk]\.": 2.5,
    r"\.(to_v|add_v_proj)\.": 2.0,
    r"\.to_(add_)?out\.": 3.0,
}
"""For blocks in which pictures and texts see each other. The prompt has to be seen: sharp attention, and more of it
than of what a token was before."""
_PIXEL_STD = 0.5
"""In [-1, 1]."""


def write_t5_tokenizer(directory: Path, *, longest: int = 512) -> None:
    """A unigram model of words' parts; a part's score falls with its rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ("<pad>", "</s>", "<unk>")
    trainer = trainers.BpeTrainer(vocab_size=T5_VOCAB - len(special), show_progress=False)
    tokenizer.train_from_iterator([CORPUS.read_text()], trainer)
    parts = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    vocab = [(token, 0.0) for token in special]
    vocab += [(part, -5.0 - rank / len(parts)) for rank, part in enumerate(parts)]
    kind = LIBRARIES["transformers"].T5Tokenizer
    kind(vocab=vocab, extra_ids=0, model_max_length=longest).save_pretrained(directory)


def write_qwen_tokenizer(directory: Path, special: tuple[str, ...], **more: Any) -> None:
    """Byte-level, with these special tokens from `BASE_VOCAB` on."""
    ends = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_tokenizer(directory, train_tokenizer(special), special, "Qwen2Tokenizer", longest=32768, **ends, **more)


def write_clip(directory: Path, number: str, seed: int, *, projected: bool, pad: str = END) -> None:
    """Tokenizer and text encoder, in `tokenizer` and `text_encoder` and their `number` ("", "_2"), of `CLIP_WIDTH`; its
    projection, if any, of the same. `pad`: what fills up a prompt."""
    vocab = write_clip_tokenizer(directory / f"tokenizer{number}", pad=pad)
    make_clip(
        directory / f"text_encoder{number}",
        "CLIPTextModelWithProjection" if projected else "CLIPTextModel",
        vocab,
        seed,
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
    )


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
