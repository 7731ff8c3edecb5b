"""How the thinker's `generate` would sample and end, read from the checkpoint; and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.models.qwen2_5_omni.library import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5OmniThinkerConfig,
)

MAX_NEW_TOKENS = 1024
"""`thinker_max_new_tokens` of the reference's `generate`."""

TOP_K = 50
"""`top_k` of `generate` where the config has none."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer_config.json")


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where it has none (it then serves `prompt_token_ids` only)."""
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model_dir}: the tokenizer cannot be read: {error}", field="model") from error


def generation_of(config: Qwen2_5OmniThinkerConfig) -> GenerationConfig:
    """What `thinker.generate` goes by.

    The reference gives `generation_config.json` to the whole model only: the thinker inside takes its end tokens and
    its sampling from its own part of `config.json`.
    """
    return GenerationConfig.from_model_config(config)


def default_sampling(generation: GenerationConfig) -> SamplingParams:
    """What `generate` goes by where it is told nothing: greedy unless the config says `do_sample`, and the filters that
    apply as soon as a temperature is asked for."""
    temperature = generation.temperature if generation.temperature is not None else 1.0
    return SamplingParams(
        temperature=temperature if generation.do_sample else 0.0,
        top_k=generation.top_k if generation.top_k is not None else TOP_K,
        top_p=generation.top_p,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        max_tokens=MAX_NEW_TOKENS,
    )


def end_tokens(
    generation: GenerationConfig, model_dir: Path, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """The ids that end a reply: the thinker config's; where it names none (the reference would then never stop),
    `generation_config.json`'s, else the tokenizer's."""
    named = generation.eos_token_id
    if named is None:
        named = _of_file(model_dir / "generation_config.json")
    if named is None and tokenizer is not None:
        named = tokenizer.eos_token_id
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)


def _of_file(path: Path) -> int | list[int] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a JSON object: {error}") from error
