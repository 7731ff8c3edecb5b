"""Registers Qwen3-Omni with the model registry. No torch here."""

from __future__ import annotations

from segue.models.family import Family
from segue.models.omni.qwen3_omni.graph import graph

FAMILY = Family(
    name="qwen3_omni",
    architectures=frozenset({"Qwen3OmniMoeForConditionalGeneration"}),
    graph=graph,
    stages_module="segue.models.omni.qwen3_omni.stages",
    reference_module="segue.models.omni.qwen3_omni.reference",
    options=frozenset({"use_audio_in_video"}),
    tiny_module="segue.models.omni.qwen3_omni.tiny.presets",
    tiny_names=("qwen3-omni",),
)
