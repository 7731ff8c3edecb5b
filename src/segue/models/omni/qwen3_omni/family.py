"""Registers Qwen3-Omni with the model registry. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from segue.messages.errors import ConfigError
from segue.models.family import Family
from segue.models.omni.qwen3_omni.graph import graph
from segue.models.shared.checkpoint.files import read_object
from segue.models.shared.omni.say import SAY, says

DEFAULT_VOICE = "ethan"
"""The speaker that `generate` of transformers uses when the caller names none."""


def voices(model_dir: Path) -> list[str]:
    """The voices of a checkpoint, the default first; empty if it has no talker."""
    config = read_object(model_dir / "config.json")
    if not config.get("enable_audio_output", True):
        return []
    speakers = config.get("talker_config", {}).get("speaker_id")
    if not isinstance(speakers, dict) or not speakers:
        raise ConfigError(f"{model_dir / 'config.json'}: talker_config has no speaker_id, so no voice", field="model")
    return voice_names(speakers)


def voice_names(speakers: Iterable[str]) -> list[str]:
    """Speakers of a config → their names for clients, the default first. Names are told apart in lower case."""
    return [name.capitalize() for name in sorted(speakers, key=lambda name: (name != DEFAULT_VOICE, name))]


FAMILY = Family(
    name="qwen3_omni",
    architectures=frozenset({"Qwen3OmniMoeForConditionalGeneration"}),
    graph=graph,
    skips_tokenizer=True,
    stages_module="segue.models.omni.qwen3_omni.stages",
    reference_module="segue.models.omni.qwen3_omni.reference",
    says=says,
    options=frozenset({"use_audio_in_video", SAY}),
    goes_on=True,
    stage_keys=frozenset({"lora", "quantization"}),
    tiny_module="segue.models.omni.qwen3_omni.tiny.presets",
    tiny_names=("qwen3-omni",),
)
