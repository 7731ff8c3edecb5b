"""Registers Qwen2.5-Omni with the model registry. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.omni.qwen2_5_omni.graph import graph
from segue.models.shared.omni.say import SAY, says

SPEAKERS = "spk_dict.pt"
DEFAULT_VOICE = "Chelsie"
"""The speaker that `generate` of transformers uses when the caller names none."""

FAMILY = Family(
    name="qwen2_5_omni",
    architectures=frozenset({"Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"}),
    graph=graph,
    skips_tokenizer=True,
    stages_module="segue.models.omni.qwen2_5_omni.stages",
    reference_module="segue.models.omni.qwen2_5_omni.reference",
    says=says,
    options=frozenset({"use_audio_in_video", SAY}),
    goes_on=True,
    stage_keys=frozenset({"lora", "quantization"}),
    tiny_module="segue.models.omni.qwen2_5_omni.tiny.presets",
    tiny_names=("qwen2.5-omni",),
)
