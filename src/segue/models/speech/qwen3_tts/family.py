"""Registers Qwen3-TTS with the model registry. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.speech.qwen3_tts.graph import graph

FAMILY = Family(
    name="qwen3_tts",
    architectures=frozenset({"Qwen3TTSForConditionalGeneration"}),
    graph=graph,
    stages_module="segue.models.speech.qwen3_tts.stages",
    options=frozenset({"instructions", "language"}),
    stage_keys=frozenset({"quantization"}),
    tiny_module="segue.models.speech.qwen3_tts.tiny.presets",
    tiny_names=("qwen3-tts", "qwen3-tts-voice-design"),
)
