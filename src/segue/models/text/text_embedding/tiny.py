"""`segue tiny bert | qwen3-embedding`: write a small embedding model in its published format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from segue.models.family import TinyPreset
from segue.models.shared.library import AutoConfig, AutoModel
from segue.models.shared.tiny.files import BASE_VOCAB, train_tokenizer, write_json, write_tokenizer
from segue.models.shared.tiny.sizes import check_size
from segue.models.shared.tiny.weights import randomise
from segue.models.text.text_embedding.recipe import MODULES

SIZES = ("tiny",)


@dataclass(frozen=True)
class _Small:
    """One family's small checkpoint."""

    model_type: str
    architecture: str
    """Name of the architecture in published checkpoints."""
    special: tuple[str, ...]
    pooling: str
    begin: str | None = None
    end: str | None = None
    pad: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)


_SHAPE: Mapping[str, Any] = {
    "vocab_size": 672,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_SMALL = {
    "bert": _Small(
        "bert",
        "BertModel",
        special=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        pooling="pooling_mode_mean_tokens",
        begin="[CLS]",
        end="[SEP]",
        pad="[PAD]",
        shape={"max_position_embeddings": 512},
    ),
    "qwen3-embedding": _Small(
        "qwen3",
        "Qwen3ForCausalLM",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        pooling="pooling_mode_lasttoken",
        end="<|endoftext|>",
        pad="<|endoftext|>",
        shape={
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "is_matryoshka": True,
        },
    ),
}
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def make(name: str, directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a checkpoint of the family `name` with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    small = _SMALL[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(small.special, begin=small.begin, end=small.end)
    longest = small.shape["max_position_embeddings"]
    write_tokenizer(directory, tokenizer, small.special, small.pad, longest)
    pad = BASE_VOCAB + small.special.index(small.pad)
    config = AutoConfig.for_model(small.model_type, **{**_SHAPE, **small.shape}, pad_token_id=pad)
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = AutoModel.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    model.config.architectures = [small.architecture]
    model.save_pretrained(directory)
    config_path = directory / "config.json"
    config_path.write_text(config_path.read_text().replace(f'"{type(model).__name__}"', f'"{small.architecture}"'))
    _write_recipe(directory, small, longest)


def _write_recipe(directory: Path, small: _Small, longest: int) -> None:
    """Write the files of sentence-transformers."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    write_json(directory, MODULES, modules)
    write_json(directory, "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    pooling = {f"pooling_mode_{mode}": f"pooling_mode_{mode}" == small.pooling for mode in _POOLINGS}
    (directory / "1_Pooling").mkdir(exist_ok=True)
    write_json(
        directory / "1_Pooling",
        "config.json",
        {"word_embedding_dimension": _SHAPE["hidden_size"], **pooling, "include_prompt": True},
    )


PRESETS = {name: TinyPreset(SIZES, partial(make, name)) for name in _SMALL}
