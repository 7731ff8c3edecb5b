"""Facts about a speech recognition checkpoint, for callers that transcribe a recording window by window."""

from __future__ import annotations

import msgspec

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
