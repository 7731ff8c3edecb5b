"""Registers encoder-decoders of transformers that transcribe audio (Whisper). No torch here.

Models that the checkpoint's files show to be unsupported are refused here, before a process starts; the others when
the stages load.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.family import Family
from segue.models.speech.speech_seq2seq.facts import OPTIONS, speech_facts
from segue.models.speech.speech_seq2seq.graph import graph

TINY = ("whisper",)
"""The families that `segue tiny` can make."""
_BY_CACHE = "its decoder counts positions by its cache: one position for all sequences of a batch"
_MASKED = "its encoder takes recordings of any length with a mask for its decoder; only fixed windows are supported"
_REASONS = MappingProxyType(
    {"speech_to_text": _BY_CACHE, **dict.fromkeys(("moonshine", "moonshine_streaming"), _MASKED)}
)
"""By model type, why it is unsupported."""


def claims(config: dict[str, Any], model_dir: Path) -> bool:
    """Whether this is an encoder-decoder whose encoder takes spectrogram windows. Raises `ConfigError` with the reason
    if it is known to be unsupported."""
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
    stages_module="segue.models.speech.speech_seq2seq.stages",
    reference_module="segue.models.speech.speech_seq2seq.reference",
    chats=lambda model_dir: False,
    options=OPTIONS,
    speech=speech_facts,
    tiny_module="segue.models.speech.speech_seq2seq.tiny",
    tiny_names=TINY,
)
