"""Registers CSM with the model registry. No torch here."""

from __future__ import annotations

from segue.messages.errors import NotFound, nearest
from segue.messages.speech import TextToSpeech
from segue.models.family import Family
from segue.models.speech.csm.graph import graph

VOICES = tuple(str(speaker) for speaker in range(10))
"""Speaker ids, the default first. The model takes any number, and learned none by name: the same id sounds alike within
a conversation."""


def speaker(voice: str | None) -> str:
    """The speaker id of a request's voice. Raises `NotFound`."""
    if voice is None:
        return VOICES[0]
    if voice not in VOICES:
        raise NotFound(f"voice is {voice!r}{nearest(voice, VOICES)}; voices are speaker ids", field="voice")
    return voice


FAMILY = Family(
    name="csm",
    architectures=frozenset({"CsmForConditionalGeneration"}),
    graph=graph,
    skips_tokenizer=True,
    stages_module="segue.models.speech.csm.stages",
    reference_module="segue.models.speech.csm.reference",
    says=lambda config, model_dir: TextToSpeech(cloning=True),
    options=frozenset({"ref_text"}),
    stage_keys=frozenset({"quantization"}),
    tiny_module="segue.models.speech.csm.tiny.presets",
    tiny_names=("csm",),
)
