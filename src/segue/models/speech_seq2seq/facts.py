"""What a checkpoint's files say of how it is asked: languages, tasks, marks of time. No torch here.

The places are those that the library's `generate` for such models reads: `generation_config.json`, then `config.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.messages.speech import SpeechFacts
from segue.models.json_files import read_object

OPTIONS = frozenset({"language", "task", "timestamps", "prompt"})
"""Of a request."""
TASKS = ("transcribe", "translate")
_STRIDE = 2
"""Frames of the spectrogram per row of the encoder."""
_THRESHOLDS = ("logprob_threshold", "compression_ratio_threshold", "no_speech_threshold", "condition_on_prev_tokens")
"""What lets `generate` try a window again, leave it out, or read on from the one before."""


def speech_facts(config: dict[str, Any], model_dir: Path) -> SpeechFacts:
    """Raises `ConfigError` where a file lacks something, or asks for what is not done."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not there; it says which tokens stand for languages and tasks", field="model")
    generation = read_object(path)
    for name in _THRESHOLDS:
        if generation.get(name):
            raise ConfigError(
                f"{path}: {name} is {generation[name]!r}, which is not done here; leave it out", field=name
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
