"""How the library's `generate` would sample and end, read from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.models.checkpoint_values import GENERATION, check_generation
from segue.models.json_files import check_objects
from segue.models.library import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

TOP_K = 50
"""`top_k` of `generate` where the config has none."""


def generation_of(model_dir: Path, config: PreTrainedConfig) -> GenerationConfig:
    """`generation_config.json`; where there is none, what the model's own config says of generation."""
    path = model_dir / GENERATION
    if not path.is_file():
        return generation_in(config, model_dir)
    try:
        generation = GenerationConfig.from_pretrained(model_dir)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        check_objects(model_dir, (GENERATION,))
        raise ConfigError(f"{path}: {error}", field="model") from error
    _check(generation, config, path)
    return generation


def generation_in(config: PreTrainedConfig, model_dir: Path) -> GenerationConfig:
    """What a model's own config, in `config.json`, says of generation. Raises `ConfigError` naming what is wrong."""
    generation = GenerationConfig.from_model_config(config)
    _check(generation, config, model_dir / "config.json")
    return generation


def _check(generation: GenerationConfig, config: PreTrainedConfig, path: Path) -> None:
    text = config.get_text_config(decoder=True)
    check_generation(generation.to_dict(), path, text.vocab_size if "vocab_size" in text else None)


def default_sampling(generation: GenerationConfig, max_tokens: int | None = None) -> SamplingParams:
    """What `generate` goes by where it is told nothing: greedy unless the config says `do_sample`, and the filters that
    apply as soon as a temperature is asked for. `max_tokens` where the config has no `max_new_tokens`."""
    temperature = generation.temperature if generation.temperature is not None else 1.0
    suppressed = list(generation.suppress_tokens or ())
    return SamplingParams(
        temperature=temperature if generation.do_sample else 0.0,
        top_k=generation.top_k if generation.top_k is not None else TOP_K,
        top_p=generation.top_p,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        max_tokens=max_tokens,
        suppress_tokens=suppressed or None,
    )


def end_tokens(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end a reply: the generation config's; where it names none (the reference would then never stop),
    the tokenizer's."""
    named = generation.eos_token_id
    if named is None and tokenizer is not None:
        named = tokenizer.eos_token_id
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
