"""`segue tiny qwen2.5-vl | qwen3-vl | llava-onevision | gemma3-vision | llama3.2-vision | qwen2-audio`: write a small
multimodal model in a family's published format."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from segue.models.family import TinyPreset
from segue.models.omni.multimodal_lm.tiny.config import SMALL, Small, config_values
from segue.models.shared.library import AutoConfig, AutoModelForMultimodalLM, GenerationConfig, PreTrainedModel
from segue.models.shared.tiny.files import added_tokens, speakable, train_tokenizer, write_json
from segue.models.shared.tiny.sizes import check_size
from segue.models.shared.tiny.weights import prefer, randomise

SIZES = ("tiny",)


def make(name: str, directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a checkpoint of the family `name` with random weights; equal seeds give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    small = SMALL[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(small.special, begin=small.begin)
    _write_tokenizer(directory, tokenizer, small)
    for file, values in small.files.items():
        write_json(directory, file, dict(values))
    config = AutoConfig.for_model(small.model_type, **config_values(small))
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    _scale_rows(model, small)
    end, pad = small.id_of(small.end), small.id_of(small.pad)
    prefer(model, speakable(tokenizer), end, small.end_gain)
    begin = None if small.begin is None else small.id_of(small.begin)
    model.generation_config = GenerationConfig(bos_token_id=begin, eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(directory)


def _scale_rows(model: PreTrainedModel, small: Small) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for pattern, gain in small.rows.items():
                if re.search(pattern, name):
                    parameter.mul_(gain)


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, small: Small) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "added_tokens_decoder": added_tokens(tokenizer, small.special),
        "bos_token": small.begin,
        "clean_up_tokenization_spaces": False,
        "eos_token": small.end,
        "pad_token": small.pad,
        "model_max_length": 32768,
        "tokenizer_class": "Qwen2Tokenizer" if small.begin is None else "PreTrainedTokenizerFast",
        **({"extra_special_tokens": dict(small.names)} if small.names else {}),
        **small.names,
    }
    write_json(directory, "tokenizer_config.json", config)
    write_json(directory, "chat_template.json", {"chat_template": small.template})


PRESETS = {name: TinyPreset(SIZES, partial(make, name)) for name in SMALL}
