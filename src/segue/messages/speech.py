"""Facts about checkpoints that transcribe a recording window by window, and about those that say a given text.

Optional reading: only for the endpoints of speech.
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.sampling import SamplingParams

SECONDS_PER_TIME = 0.02
"""Between two consecutive timestamp tokens (Radford et al., *Robust Speech Recognition via Large-Scale Weak
Supervision*, §2.3)."""
SECONDS_PER_FRAME = 0.01


def time_mark(steps: int) -> str:
    """Return the timestamp token for `steps` time steps, as the vocabulary writes it."""
    return f"<|{steps * SECONDS_PER_TIME:.2f}|>"


class SpeechFacts(msgspec.Struct, frozen=True):
    """Languages, tasks and timestamp tokens of one checkpoint."""

    languages: dict[str, int]
    """Language code → its token; empty for a model of one language, whose prompt has no language token."""
    tasks: list[str]
    """The supported ones of `transcribe` and `translate`."""
    first_time: int
    """The timestamp token of 0.00 seconds; those of later times follow."""
    window: int
    """Frames that the encoder takes per call."""
    stride: int
    """Frames per timestamp step."""


class TextToSpeech(msgspec.Struct, frozen=True):
    """How a checkpoint says a given text, which is the text of a single user message."""

    instructions: bool = False
    """Whether it takes the option `instructions`: how to say it."""
    languages: list[str] = []
    """The values of its option `language`; empty: it takes none."""
    cloning: bool = False
    """Whether it says the text in the voice of a recording (`MediaPart.role` is `voice`), with the option `ref_text`:
    the recording's words."""
    appends: bool = False
    """Whether it goes on with text that is appended to a running request, token by token. Pieces are then cut where no
    tokenizer joins characters: before a mark or space that follows a letter or digit."""
    options: dict[str, Any] = {}
    """Options that every such request has."""
    sampling: dict[str, SamplingParams] = {}
    """By stage: defaults of such requests, e.g. a `max_tokens` that does not cut a long text."""
