"""Write tiny pipelines: random weights that behave, the files of the published layout, and the parts that several
families share (CLIP's and T5's text encoders with their tokenizers, the VAE).

Default initialisation tests nothing: images are grey, blocks add next to nothing and the prompt has no effect. Here
matrices have entries of std gain / sqrt(fan in), and the last layers are scaled by measurement (`scale_to`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import CLIPTokenizer

from segue.models.registry import PIPELINE
from segue.models.shared.diffusion.library import LIBRARIES, VERSION, AutoConfig
from segue.models.shared.tiny.files import CORPUS, added_tokens, train_tokenizer, write_json

Part = tuple[str | None, str | None]
"""(library, class); both None for a part that is left out."""


@dataclass(frozen=True)
class RopeSize:
    """One size of a denoiser with rotary positions along three axes."""

    layers: int
    heads: int
    rope: tuple[int, int, int]
    """Dimensions of a head for each axis."""

    @property
    def head(self) -> int:
        return sum(self.rope)


def write_index(directory: Path, pipeline: str, parts: Mapping[str, Part], **settings: Any) -> None:
    """Write `model_index.json`; `parts` by name."""
    named = {name: list(part) for name, part in sorted(parts.items())}
    write_json(directory, PIPELINE, {"_class_name": pipeline, "_diffusers_version": VERSION, **settings, **named})


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, special: tuple[str, ...], kind: str, *, longest: int, **more: Any
) -> None:
    """Write the folder of a tokenizer of class `kind` of transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {
        "added_tokens_decoder": added_tokens(tokenizer, special),
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "tokenizer_class": kind,
        **more,
    }
    write_json(directory, "tokenizer_config.json", values)


def randomise(network: nn.Module, seed: int, gains: Mapping[str, float] | None = None) -> None:
    """Redraw all weights, in the order of their names: equal for equal seeds.

    `gains`: by pattern of a parameter's name; the first match counts, 1.0 without a match. Scales (norms: one number
    per channel) stay near 1, biases near 0.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            gain = next((gain for pattern, gain in (gains or {}).items() if re.search(pattern, name)), 1.0)
            if id(parameter) in embeddings:
                parameter.copy_(gain * noise)
            elif parameter.numel() > max(parameter.shape):
                fan_in = math.prod(parameter.shape[1:])
                parameter.copy_(noise * gain / math.sqrt(fan_in))
            elif name.endswith(("weight", "gamma")):
                parameter.copy_(gain * (1.0 + 0.1 * noise))
            else:
                parameter.copy_(0.05 * noise)


@torch.no_grad()
def scale_to(std: float, layer: nn.Module, measure: Callable[[], torch.Tensor]) -> None:
    """Scale a last layer so that the result of `measure` has this standard deviation and a mean of about 0."""
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    bias.zero_()
    weight.mul_(std / measure().std())


BEGIN, END = "<|startoftext|>", "<|endoftext|>"
LONGEST = 77
MERGES = 160
_WORD_END = "</w>"


def write_clip_tokenizer(directory: Path, *, pad: str = END) -> dict[str, int]:
    """Write the folder of a `CLIPTokenizer`; returns its vocabulary. `pad`: the padding token."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab, merges = _learn()
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n")
    (directory / "merges.txt").write_text("\n".join(("#version: 0.2", *merges)) + "\n")
    special = {"bos_token": BEGIN, "eos_token": END, "pad_token": pad, "unk_token": END}
    write_json(directory, "special_tokens_map.json", special)
    config = {"model_max_length": LONGEST, "do_lower_case": True, "tokenizer_class": "CLIPTokenizer", **special}
    write_json(directory, "tokenizer_config.json", config)
    return vocab


def make_clip(directory: Path, kind: str, vocab: dict[str, int], seed: int, **sizes: Any) -> Any:
    """Write a text encoder of class `kind` of transformers; `sizes`: entries of its config."""
    config = AutoConfig.for_model(
        "clip_text_model",
        **{
            "vocab_size": len(vocab),
            "bos_token_id": vocab[BEGIN],
            "eos_token_id": vocab[END],
            "pad_token_id": vocab[END],
            "max_position_embeddings": LONGEST,
            **sizes,
        },
    )
    network = getattr(LIBRARIES["transformers"], kind)(config).eval()
    randomise(network, seed, {r"\.[qk]_proj\.": 1.3, r"\.out_proj\.": 2.0, "position_embedding": 0.3})
    network.save_pretrained(directory)
    return network


def _learn() -> tuple[dict[str, int], list[str]]:
    """Vocabulary, in the published order (bytes, bytes that end a word, merges, special tokens), and merges.

    Byte pairs are merged by frequency (Sennrich et al. 2016, section 3.2), ties alphabetically, because the trainer of
    `tokenizers` breaks ties arbitrarily if words have an end marker.
    """
    blank = CLIPTokenizer().backend_tokenizer
    assert blank.normalizer is not None
    assert blank.pre_tokenizer is not None
    found = blank.pre_tokenizer.pre_tokenize_str(blank.normalizer.normalize_str(CORPUS.read_text()))
    words = {word: (*word[:-1], word[-1] + _WORD_END) for word, _ in found}
    counts = Counter(word for word, _ in found)
    learnt: list[tuple[str, str]] = []
    for _ in range(MERGES):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learnt.append(best)
        words = {word: _merged(pieces, best) for word, pieces in words.items()}
    letters = _bytes()
    entries = [*letters, *(letter + _WORD_END for letter in letters), *("".join(pair) for pair in learnt), BEGIN, END]
    return {entry: index for index, entry in enumerate(dict.fromkeys(entries))}, [" ".join(pair) for pair in learnt]


def _merged(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    made: list[str] = []
    for piece in pieces:
        if made and (made[-1], piece) == pair:
            made[-1] += piece
        else:
            made.append(piece)
    return tuple(made)


def _bytes() -> list[str]:
    """The characters that byte-level BPE writes for the 256 bytes, printable bytes first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


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
"""Chat template of a Qwen 3 text encoder."""
JOINT_GAINS: Mapping[str, float] = {
    r"\.norm_(added_)?[qk]\.": 2.5,
    r"\.(to_v|add_v_proj)\.": 2.0,
    r"\.to_(add_)?out\.": 3.0,
}
"""For blocks with joint attention of images and texts. They make the prompt visible: sharp attention, whose output
outweighs the residual."""
_PIXEL_STD = 0.5
"""Target standard deviation of pixels in [-1, 1]."""


def write_t5_tokenizer(directory: Path, *, longest: int = 512) -> None:
    """Write a unigram tokenizer of word parts; a part's score falls with its rank."""
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
    """Write a byte-level tokenizer with these special tokens from `BASE_VOCAB` on."""
    ends = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_tokenizer(directory, train_tokenizer(special), special, "Qwen2Tokenizer", longest=32768, **ends, **more)


def write_clip(directory: Path, number: str, seed: int, *, projected: bool, pad: str = END) -> None:
    """Write tokenizer and text encoder to `tokenizer` and `text_encoder` plus their `number` ("", "_2"), of
    `CLIP_WIDTH`; its projection, if any, has the same width. `pad`: the padding token."""
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
    """Write a T5 encoder of the given width."""
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
    # T5 does not divide by the root of a head's width, and padding is visible, so words need large activations
    randomise(model, seed, {r"\.[qk]\.": 0.6, "relative_attention_bias": 0.5, r"\.o\.": 2.0})
    model.save_pretrained(directory)


def write_kl_vae(directory: Path, seed: int, *, channels: int = 16, **config: Any) -> None:
    """Write a VAE with 8 pixels per latent; `config`: scaling and further entries."""
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
    images = torch.rand(2, 3, 64, 64, generator=generator) * 2 - 1
    scale_to(_PIXEL_STD, vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0])
    # scale the mean of the encoded distribution; the variance stays small
    scale_to(1 / vae.config.scaling_factor, vae.encoder.conv_out, lambda: vae.encoder(images)[:, :channels])
    with torch.no_grad():
        vae.encoder.conv_out.weight[channels:] *= 0.1
        vae.encoder.conv_out.bias[channels:] = -4.0
    vae.save_pretrained(directory)
