"""Values in a checkpoint's JSON files that no engine could go by: refused before one does. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError
from segue.models.json_files import read_object

GENERATION = "generation_config.json"
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that configs have for how many tokens a sequence may have."""

# name → (lowest, highest, lowest is allowed, "what would be right")
_BOUNDS: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0.0, math.inf, True, "a number from 0"),
    "top_p": (0.0, 1.0, True, "a number from 0 to 1"),
    "min_p": (0.0, 1.0, True, "a number from 0 to 1"),
    "repetition_penalty": (0.0, math.inf, False, "a number above 0"),
}
_WHOLE: dict[str, tuple[int, str]] = {
    "top_k": (-1, "an integer, -1 or 0 for all tokens"),
    "max_new_tokens": (1, "an integer from 1"),
}


def check_files(model_dir: Path, config: Mapping[str, Any], graph: StageGraph) -> None:
    """Of a checkpoint that writes tokens, what its files say of lengths and sampling. `config`: its `config.json`.

    Raises `ConfigError` naming file, field, value and what would be right. A worker, which reads them by the library,
    says the same of what only the library finds.
    """
    if not any(stage.engine == "autoregressive" for stage in graph.stages.values()):
        return
    path = model_dir / "config.json"
    for names, values in _decoders(config, ()):
        for name in LENGTHS:
            check_positions(values.get(name), ".".join((*names, name)), path)
    path = model_dir / GENERATION
    if path.is_file():
        check_generation(read_object(path), path, None)


def _decoders(values: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """A config and, at any depth, those in it of parts with a vocabulary; each with the names that lead there."""
    if not names or "vocab_size" in values:
        yield names, values
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _decoders(value, (*names, name))


def check_positions(value: object, name: str, path: Path | str) -> None:
    """How many tokens a sequence may have, where it is a number; of what type it is, the library's config says."""
    if isinstance(value, int) and value < 2:
        raise ConfigError(
            f"{path}: {name} is {value}; it must be the number of tokens that a sequence may have, at least 2",
            field="model",
        )


def check_generation(values: Mapping[str, Any], path: Path, vocab: object) -> None:
    """What a generation config (`values`, read from `path`) says of sampling and ends: the library takes anything.
    `vocab`: how many token ids there are, as far as that is a number."""
    for name, value, right in _wrong(values, vocab):
        raise ConfigError(f"{path}: {name} is {value!r}; it must be {right}", field="model")


def _wrong(values: Mapping[str, Any], vocab: object) -> Iterator[tuple[str, Any, str]]:
    """(name, value, what would be right) of each that is wrong."""
    sampled = values.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        yield "do_sample", sampled, "true or false"
    for name, (low, high, touches, right) in _BOUNDS.items():
        value = values.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (number and low <= value <= high and (touches or value != low)):
            yield name, value, right
    for name, (least, right) in _WHOLE.items():
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            yield name, value, right
    for name in ("eos_token_id", "suppress_tokens"):
        value = values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
            yield name, value, "a token id, or a list of them"
        elif name == "suppress_tokens" and isinstance(vocab, int) and any(not 0 <= one < vocab for one in ids):
            yield name, value, f"a list of token ids, which are from 0 to {vocab - 1}"
