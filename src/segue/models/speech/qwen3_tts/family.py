"""Registers Qwen3-TTS with the model registry. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.speech import TextToSpeech
from segue.models.family import Family
from segue.models.speech.qwen3_tts.config import config_of
from segue.models.speech.qwen3_tts.graph import graph


def says(config: dict[str, Any], model_dir: Path) -> TextToSpeech:
    """How a checkpoint says a given text. Raises `ConfigError`, as `graph`."""
    values = config_of(config, model_dir / "config.json")
    return TextToSpeech(instructions=values.takes_instructions, languages=values.languages, appends=True)


FAMILY = Family(
    name="qwen3_tts",
    architectures=frozenset({"Qwen3TTSForConditionalGeneration"}),
    graph=graph,
    stages_module="segue.models.speech.qwen3_tts.stages",
    says=says,
    appends=True,
    options=frozenset({"instructions", "language"}),
    stage_keys=frozenset({"quantization"}),
    tiny_module="segue.models.speech.qwen3_tts.tiny.presets",
    tiny_names=("qwen3-tts", "qwen3-tts-voice-design"),
)
