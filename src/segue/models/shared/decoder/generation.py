"""Read from a checkpoint how the library's `generate` would sample and stop, and how many tokens the model accepts."""

from __future__ import annotations

from pathlib import Path

from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams, merged
from segue.models.shared.checkpoint.files import GENERATION, check_generation, check_objects, check_positions
from segue.models.shared.library import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

UNBOUNDED = 8192
"""Sequence length if neither the config nor the deployment sets one."""
_AFTER_PADDING = frozenset(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text"))
"""Model types whose first position is the padding token's id + 1."""


def context_length(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence that a text config allows, or `wanted` if that is less.

    Rotary scalings that depend on the sequence length ("longrope", "dynamic") apply to a whole flat batch: such a model
    is served up to the length of the first change. Raises `ConfigError` if `wanted` exceeds the limit.
    """
    longest = _stated(config)
    if longest is None:  # a recurrent state has the same size after a million tokens
        return wanted or UNBOUNDED
    ropes = config.rope_parameters if "rope_parameters" in config else None
    for rope in [ropes, *(ropes or {}).values()]:
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            longest = min(longest, original or longest)
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len is {wanted}; this model can be served up to {longest} tokens", field="max_model_len"
        )
    return wanted or longest


def whole_length(config: PreTrainedConfig, own: int | None, unsaid: str, wanted: int | None) -> int:
    """The longest text of a model that reads whole texts: the limit of its positions and its other files (`own`), or
    `wanted` if that is less. `unsaid`: the other possible source, for the error. Raises `ConfigError` if no source sets
    a limit, or `wanted` exceeds it."""
    bounds = [bound for bound in (_positions(config), own) if bound is not None]
    if not bounds:
        raise ConfigError(
            f"config.json has no max_position_embeddings and {unsaid}; one of them must say how many tokens a text may "
            "have",
            field="model",
        )
    longest = min(bounds)
    if wanted is not None and wanted > longest:
        raise ConfigError(f"max_model_len is {wanted}; this model takes up to {longest} tokens", field="max_model_len")
    return wanted or longest


def _positions(config: PreTrainedConfig) -> int | None:
    """The number of tokens for which the model has positions."""
    longest = _stated(config)
    if longest is not None and config.model_type in _AFTER_PADDING:
        longest -= (config.pad_token_id or 0) + 1
    return longest


def _stated(config: PreTrainedConfig) -> int | None:
    """`max_position_embeddings` under the config's own name for it; renamed keys are found only as attributes. MPT has
    `max_seq_len`. Raises `ConfigError` for a number too small for one token."""
    for name in ("max_position_embeddings", "max_seq_len"):
        longest: int | None = getattr(config, name, None)
        if longest is not None:
            check_positions(longest, config.attribute_map.get(name, name), "config.json")
            return longest
    return None


TOP_K = 50
"""`top_k` of `generate` if the config has none."""


def generation_of(model_dir: Path, config: PreTrainedConfig) -> GenerationConfig:
    """`generation_config.json`, else the generation settings in the model's own config."""
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
    """The generation settings in a model's own `config.json`. Raises `ConfigError` with the invalid setting."""
    generation = GenerationConfig.from_model_config(config)
    _check(generation, config, model_dir / "config.json")
    return generation


def _check(generation: GenerationConfig, config: PreTrainedConfig, path: Path) -> None:
    text = config.get_text_config(decoder=True)
    check_generation(generation.to_dict(), path, text.vocab_size if "vocab_size" in text else None)


def default_sampling(generation: GenerationConfig, family: SamplingParams | None = None) -> SamplingParams:
    """The defaults of `generate`: `family` (arguments that the family's own `generate` passes), then those of the
    config: greedy unless it sets `do_sample`, and the filters that apply once a temperature is set."""
    temperature = generation.temperature if generation.temperature is not None else 1.0
    suppressed = list(generation.suppress_tokens or ())
    checkpoint = SamplingParams(
        temperature=temperature if generation.do_sample else 0.0,
        top_k=generation.top_k if generation.top_k is not None else TOP_K,
        top_p=generation.top_p,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        suppress_tokens=suppressed or None,
    )
    return merged(family=family, checkpoint=checkpoint)


def end_tokens(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end a reply: those of the generation config; if it names none (the reference would then never stop),
    the tokenizer's."""
    named = generation.eos_token_id
    if named is None and tokenizer is not None:
        named = tokenizer.eos_token_id
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
