"""How many tokens a model takes, by its config and the deployment."""

from __future__ import annotations

from segue.messages.errors import ConfigError
from segue.models.checkpoint_values import check_positions
from segue.models.library import PreTrainedConfig

UNBOUNDED = 8192
"""Tokens of a sequence where neither the config nor the deployment says how many."""
_AFTER_PADDING = frozenset(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text"))
"""Model types whose first position is the one after the padding token's id."""


def context_length(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence a text config allows, or `wanted` where that is less.

    Rotary scalings that change with the length of the sequence ("longrope", "dynamic") are one for a whole flat batch:
    such a model is served up to the length where the first change comes. Raises `ConfigError` where more is wanted.
    """
    longest = _stated(config)
    if longest is None:  # a state is as large after a million tokens
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
    """The longest text of a model that reads texts whole: as its positions and its other files (`own`) allow it, or
    `wanted` where that is less. `unsaid`: what else could say it. Raises `ConfigError` where nothing does, and where
    more is wanted."""
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
    """How many tokens the model's positions hold."""
    longest = _stated(config)
    if longest is not None and config.model_type in _AFTER_PADDING:
        longest -= (config.pad_token_id or 0) + 1
    return longest


def _stated(config: PreTrainedConfig) -> int | None:
    """`max_position_embeddings`, by whatever name the config has it: names it goes by besides are found as attributes
    alone. MPT has `max_seq_len`. Raises `ConfigError` for a number that leaves no room for a token."""
    for name in ("max_position_embeddings", "max_seq_len"):
        longest: int | None = getattr(config, name, None)
        if longest is not None:
            check_positions(longest, config.attribute_map.get(name, name), "config.json")
            return longest
    return None
