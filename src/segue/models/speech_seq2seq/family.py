"""Encoder-decoders of transformers that write down what they hear (Whisper), as the registry knows them. No torch here.

What can be told from the checkpoint's files is refused here, before a process is started; the rest when the stages are
loaded.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.family import Family
from segue.models.speech_seq2seq.facts import OPTIONS, speech_facts
from segue.models.speech_seq2seq.graph import graph

TINY = ("whisper",)
"""The families that `segue tiny` knows."""
_BY_CACHE = "its decoder counts positions by its cache: one place for all sequences of a batch"
_MASKED = "its encoder takes recordings of any length, of which its decoder is told by a mask; windows are heard here"
_REASONS = MappingProxyType(
    {"speech_to_text": _BY_CACHE, **dict.fromkeys(("moonshine", "moonshine_streaming"), _MASKED)}
)
"""By model type, why it is not served."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """An encoder-decoder whose encoder takes windows of a spectrogram. Raises `ConfigError` for one that is known not
    to be served, with the reason."""
    names = config.get("architectures") or []
    if not names or not config.get("is_encoder_decoder"):
        return False
    if reason := _REASONS.get(str(config.get("model_type"))):
        raise ConfigError(f"{names[0]} cannot be served: {reason}", field="architectures")
    if "num_mel_bins" not in config or "max_source_positions" not in config:
        return False
    speech_facts(config, model_dir)
    return True


FAMILY = Family(
    name="speech_seq2seq",
    architectures=frozenset(),
    claims=claims,
    graph=graph,
    stages_module="segue.models.speech_seq2seq.stages",
    chats=lambda model_dir: False,
    options=OPTIONS,
    speech=speech_facts,
    tiny_module="segue.models.speech_seq2seq.tiny",
    tiny_names=TINY,
)
