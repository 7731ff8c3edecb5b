"""Registers Higgs Audio v2 with the model registry. No torch here."""

from __future__ import annotations

from segue.messages.speech import TextToSpeech
from segue.models.family import Family
from segue.models.speech.higgs_audio_v2.graph import graph

FAMILY = Family(
    name="higgs_audio_v2",
    architectures=frozenset({"HiggsAudioV2ForConditionalGeneration"}),
    graph=graph,
    stages_module="segue.models.speech.higgs_audio_v2.stages",
    says=lambda config, model_dir: TextToSpeech(instructions=True),
    options=frozenset({"instructions"}),
    stage_keys=frozenset({"quantization"}),
    tiny_module="segue.models.speech.higgs_audio_v2.tiny.presets",
    tiny_names=("higgs-audio-v2",),
)
