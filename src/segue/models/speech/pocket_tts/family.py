"""Registers Pocket TTS with the model registry. No torch here."""

from __future__ import annotations

from segue.messages.speech import TextToSpeech
from segue.models.family import Family
from segue.models.speech.pocket_tts.graph import graph

FAMILY = Family(
    name="pocket_tts",
    architectures=frozenset({"PocketTTSForConditionalGeneration"}),
    graph=graph,
    stages_module="segue.models.speech.pocket_tts.stages",
    says=lambda config, model_dir: TextToSpeech(),
    stage_keys=frozenset({"quantization"}),
    tiny_module="segue.models.speech.pocket_tts.tiny.presets",
    tiny_names=("pocket-tts",),
)
