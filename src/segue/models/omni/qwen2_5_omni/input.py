"""The input stage of Qwen2.5-Omni. `stages` documents the payload."""

from __future__ import annotations

from segue.engines.contract import LoadContext
from segue.models.omni.qwen2_5_omni.family import SPEAKERS
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniProcessor
from segue.models.omni.qwen2_5_omni.loading import read_speakers
from segue.models.shared.omni.input import OmniInput

_SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""The system prompt that the published checkpoint was trained to speak with."""
_PLACEHOLDERS = {"image": "<|IMAGE|>", "audio": "<|AUDIO|>", "video": "<|VIDEO|>"}


class InputProcessor(OmniInput):
    """Prepares one request per call."""

    def __init__(self, ctx: LoadContext) -> None:
        speakers = ctx.model_dir / SPEAKERS
        voices = frozenset(read_speakers(speakers)) if speakers.is_file() else frozenset[str]()
        super().__init__(ctx, Qwen2_5OmniProcessor, _PLACEHOLDERS, voices, speaks_as=_SYSTEM)
