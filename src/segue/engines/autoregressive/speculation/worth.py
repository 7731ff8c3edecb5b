"""Does speculation pay? Per request, from its own acceptance and the measured cost of drafting and of wider steps.

With N sequences in a step of T seconds, drafts for one of them make it Δ longer and give that one `a` tokens more. More
tokens per second come out where (N + a) / (T + Δ) > N / T, that is where a > N Δ / T: on an idle machine a wide step is
nearly free and almost any acceptance pays; where the batch fills the machine, none does.
"""

from __future__ import annotations

from collections import deque

_FORGET = 0.98
"""Weight of older measurements, per step."""
_WINDOW = 16
_JUDGED = 8
"""Verified steps before a request is judged."""
_REST, _LONGEST_REST = 32, 512
"""Tokens a request goes without drafts after it was switched off: doubled each time it did not pay again."""


class Costs:
    """Step time as a line over the rows of the step (least squares, older steps forgotten); the time of drafting."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0
        self._draft = 0.0

    def step(self, rows: int, seconds: float) -> None:
        """A step without prefill took so long."""
        self._count = self._count * _FORGET + 1
        self._rows = self._rows * _FORGET + rows
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + rows * rows
        self._products = self._products * _FORGET + rows * seconds

    def drafting(self, sequences: int, seconds: float) -> None:
        """Drafting for so many sequences took so long."""
        self._draft += (1 - _FORGET) * (seconds / sequences - self._draft) if self._draft else seconds / sequences

    def break_even(self, sequences: int, drafts: float) -> float:
        """Accepted tokens per step above which `drafts` per step pay for one of `sequences`; 0 before any
        measurement."""
        if not self._count:
            return 0.0
        spread = self._squares / self._count - (self._rows / self._count) ** 2
        slope = 0.0
        if spread > 1e-6:
            slope = (self._products / self._count - self._rows * self._seconds / self._count**2) / spread
        slope = max(0.0, slope)
        plain = self._seconds / self._count + slope * (sequences - self._rows / self._count)
        longer = slope * drafts + self._draft
        # a line fitted to noise can leave nothing for a plain step: every row then has its share of the time
        plain = max(plain, slope * sequences, 1e-9)
        return sequences * longer / plain


class Gate:
    """Whether one request speculates now."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        self._rest = 0
        self._next_rest = _REST

    @property
    def open(self) -> bool:
        return self._rest == 0

    def rested(self, tokens: int) -> None:
        """So many tokens were generated without drafts."""
        self._rest = max(0, self._rest - tokens)

    def verified(self, drafts: int, accepted: int, costs: Costs, sequences: int) -> None:
        """A step verified drafts; closes the gate where they have not been worth it lately."""
        self._steps.append((drafts, accepted))
        count = len(self._steps)
        if count < _JUDGED:
            return
        drafted = sum(drafts for drafts, _ in self._steps) / count
        gained = sum(accepted for _, accepted in self._steps) / count
        if gained > costs.break_even(sequences, drafted):
            self._next_rest = _REST
            return
        self._steps.clear()
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
