"""`segue tiny llama | mistral | qwen2 | …`: write a small language model in a family's published format."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from segue.models.family import TinyPreset
from segue.models.shared.library import AutoConfig, AutoModelForCausalLM, GenerationConfig
from segue.models.shared.tiny.files import added_tokens, speakable, train_tokenizer, write_json
from segue.models.shared.tiny.sizes import check_size
from segue.models.shared.tiny.weights import prefer, randomise
from segue.models.text.causal_lm.tiny_config import SMALL, Small, config_values

_SHARD = {"tiny": "200KB"}
"""Small enough for several files; other sizes use the library's own limit."""


def make(name: str, directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Write a checkpoint of the family `name` with random weights, rounded to `dtype`; equal size and seed give equal
    files.

    Raises `InvalidRequest` for an unknown size.
    """
    small = SMALL[name]
    sizes = sizes_of(small)
    check_size(size, sizes)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(small.special, begin=small.begin)
    _write_tokenizer(directory, tokenizer, small)
    config = AutoConfig.for_model(small.model_type, **config_values(small, size))
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed, embedding_std=small.embedding_std)
    prefer(model, speakable(tokenizer), small.id_of(small.ends[0]), small.end_gain)
    model.to(dtype)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    if (shard := _SHARD.get(size)) is None:
        model.save_pretrained(directory)
    else:
        model.save_pretrained(directory, max_shard_size=shard)


def sizes_of(small: Small) -> tuple[str, ...]:
    return ("tiny", *small.sizes)


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, small: Small) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "added_tokens_decoder": added_tokens(tokenizer, small.special),
        "bos_token": small.begin,
        "clean_up_tokenization_spaces": False,
        "eos_token": small.ends[0],
        "pad_token": small.pad,
        "model_max_length": 32768,
        "tokenizer_class": small.tokenizer_class,
        **({} if small.template is None else {"chat_template": small.template}),
    }
    write_json(directory, "tokenizer_config.json", config)


PRESETS = {name: TinyPreset(sizes_of(small), partial(make, name)) for name, small in SMALL.items()}
