"""When the speech ends: the rule of `PocketTTSEosThresholdCriteria`, as a constraint on code 0 of each row.

Code 0 says what a frame is: `SPEECH`, `CROSSED` (its stop score is above the threshold), or `LAST`. Some frames follow
the first that crossed, and the last of them ends the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from segue.models.shared.speech.talker import NEVER

SPEECH, CROSSED, LAST = range(3)
KINDS = 3


def kind_logits(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """[n] stop scores → [n, KINDS] float32: a frame is speech, or has crossed, whatever the temperature."""
    crossed = scores.float() > threshold
    broken = scores.float() * 0.0  # NaN stays NaN
    speech = torch.where(crossed, NEVER, 0.0) + broken
    return torch.stack([speech, NEVER - speech, torch.full_like(speech, NEVER)], dim=1)


@dataclass(slots=True)
class Ending:
    """`TokenRule` of one utterance."""

    first: int
    """Frames at the beginning whose scores are ignored."""
    after: int
    """Frames after the first that crossed."""
    budget: int | None
    """Most frames; None: as many as the request allows."""
    _seen: int = 0
    _crossed: int | None = None
    """Index of the first frame that crossed."""

    @property
    def remembers(self) -> bool:
        return True

    def saw(self, token: int) -> None:
        if token == CROSSED and self._crossed is None:
            self._crossed = self._seen
        self._seen += 1

    def copy(self) -> Ending:
        return replace(self)

    def apply(self, logits: torch.Tensor, generated: int) -> None:
        """Allow one kind in `logits` [KINDS], in place."""
        crosses = self._crossed is None and generated >= self.first and bool(logits[CROSSED] > logits[SPEECH])
        begun = generated if crosses else self._crossed
        out = self.budget is not None and generated + 1 >= self.budget
        last = out or (begun is not None and generated >= begun + self.after)
        kind = LAST if last else CROSSED if crosses else SPEECH
        broken = logits[SPEECH] * 0.0
        logits.fill_(NEVER)
        logits[kind] = broken
