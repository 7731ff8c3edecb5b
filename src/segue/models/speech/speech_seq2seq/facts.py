"""Read from a checkpoint's files how to prompt it: languages, tasks, timestamps. No torch here.

The files are those that the library's `generate` for such models reads: `generation_config.json`, then `config.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.messages.speech import SpeechFacts
from segue.models.shared.checkpoint.files import read_object

OPTIONS = frozenset({"language", "task", "timestamps", "prompt"})
"""Options of a request."""
TASKS = ("transcribe", "translate")
_STRIDE = 2
"""Spectrogram frames per encoder row."""
_THRESHOLDS = ("logprob_threshold", "compression_ratio_threshold", "no_speech_threshold", "condition_on_prev_tokens")
"""Settings that make `generate` retry a window, skip it, or condition it on the previous one."""


def speech_facts(config: dict[str, Any], model_dir: Path) -> SpeechFacts:
    """Read the facts. Raises `ConfigError` for missing entries and unsupported settings."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not there; it states the tokens for languages and tasks", field="model")
    generation = read_object(path)
    for name in _THRESHOLDS:
        if generation.get(name):
            raise ConfigError(
                f"{path}: {name} is {generation[name]!r}, which is not supported; leave it out", field=name
            )
    multilingual = bool(generation.get("is_multilingual", "lang_to_id" in generation))
    languages = _ids(generation, "lang_to_id", path) if multilingual else {}
    tasks = _ids(generation, "task_to_id", path) if multilingual else {}
    return SpeechFacts(
        languages={name.strip("<|>"): token for name, token in languages.items()},
        tasks=[task for task in TASKS if task in tasks] if multilingual else ["transcribe"],
        first_time=_id(generation, "no_timestamps_token_id", path) + 1,
        window=_STRIDE * _positive(config, "max_source_positions", model_dir / "config.json"),
        stride=_STRIDE,
    )


def _id(values: dict[str, Any], name: str, path: Path) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{path}: {name} is {value!r}; it must be a token id", field=name)
    return value


def _positive(values: dict[str, Any], name: str, path: Path) -> int:
    if not _id(values, name, path):
        raise ConfigError(f"{path}: {name} is 0; it must be a number above 0", field=name)
    return int(values[name])


def _ids(values: dict[str, Any], name: str, path: Path) -> dict[str, int]:
    found = values.get(name)
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path}: {name} is {found!r}; it must be an object of token ids by name", field=name)
    return {str(key): _id(found, key, path) for key in found}
