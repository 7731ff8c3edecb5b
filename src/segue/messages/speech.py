"""What is known of a model that writes down what it hears, to those who ask it window by window."""

from __future__ import annotations

import msgspec

SECONDS_PER_TIME = 0.02
"""From one mark of time to the next (Radford et al., *Robust Speech Recognition via Large-Scale Weak Supervision*,
§2.3)."""
SECONDS_PER_FRAME = 0.01


def time_mark(steps: int) -> str:
    """As the vocabulary writes so many steps of time."""
    return f"<|{steps * SECONDS_PER_TIME:.2f}|>"


class SpeechFacts(msgspec.Struct, frozen=True):
    """Of one checkpoint."""

    languages: dict[str, int]
    """Code → the token of it; empty for a model of one language, which is not asked for it."""
    tasks: list[str]
    """Of `transcribe` and `translate`."""
    first_time: int
    """The token of 0.00 seconds; those of later times follow."""
    window: int
    """Frames that the encoder takes at once."""
    stride: int
    """Frames per mark of time."""
