"""The tokens that the library's `generate` forbids during transcription: some at the start, and timestamps in orders
that form no segments.

The timestamp rules are those of Radford et al., *Robust Speech Recognition via Large-Scale Weak Supervision*, as
implemented in the library's `WhisperTimeStampLogitsProcessor`: a text begins with a timestamp, timestamps come in pairs
(except that the last may end the text alone) and never decrease, and one is forced if all timestamps together are
likelier than any word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

NEVER = float("-inf")


@dataclass(slots=True)
class SpeechRule:
    """`TokenRule` of one window."""

    begin_suppress: Sequence[int]
    """Tokens that must not come first."""
    times: bool
    """The text has timestamps."""
    first_time: int
    """The token of 0.00 seconds. The token before it disables timestamps."""
    end: int
    """The token that ends a text; all lower ids are words."""
    latest_begin: int | None
    """The latest timestamp that may begin a text."""
    _last: int | None = None
    _before: int | None = None
    _time: int | None = None
    """The last timestamp so far."""

    @property
    def remembers(self) -> bool:
        return self.times

    def saw(self, token: int) -> None:
        self._before, self._last = self._last, token
        if token >= self.first_time:
            self._time = token

    def copy(self) -> SpeechRule:
        return replace(self)

    def apply(self, logits: torch.Tensor, generated: int) -> None:
        """Mask `logits` [vocab] in place."""
        if not generated and self.begin_suppress:
            logits[list(self.begin_suppress)] = NEVER
        if not self.times:
            return
        first = self.first_time
        logits[first - 1] = NEVER
        after_time = self._last is not None and self._last >= first
        paired = self._before is None or self._before >= first
        if after_time and paired:
            logits[first:] = NEVER
        elif after_time:
            logits[: self.end] = NEVER
        if self._time is not None:
            # the second of a pair may repeat the timestamp; all others must be later
            logits[first : self._time + (0 if after_time and not paired else 1)] = NEVER
        if not generated:
            logits[:first] = NEVER
            if self.latest_begin is not None:
                logits[first + self.latest_begin + 1 :] = NEVER
        likely = logits.float().log_softmax(-1)
        if bool(likely[first:].logsumexp(-1) > likely[:first].max()):
            logits[:first] = NEVER
