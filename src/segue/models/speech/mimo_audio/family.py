"""Registers MiMo-Audio with the model registry. No torch here."""

from __future__ import annotations

from segue.messages.speech import TextToSpeech
from segue.models.family import Family
from segue.models.speech.mimo_audio.graph import graph

FAMILY = Family(
    name="mimo_audio",
    architectures=frozenset({"MiMoAudioModel", "MiMoAudioForCausalLM"}),
    graph=graph,
    stages_module="segue.models.speech.mimo_audio.stages",
    says=lambda config, model_dir: TextToSpeech(instructions=True),
    goes_on=True,
    options=frozenset({"few_shot", "instructions", "thinking"}),
    stage_keys=frozenset({"quantization"}),
    tiny_module="segue.models.speech.mimo_audio.tiny.presets",
    tiny_names=("mimo-audio",),
)
