"""Decides per request whether speculation pays off, from its acceptance and the measured cost of drafts and steps.

With N sequences in a step of T seconds, drafts for one of them make it Δ longer and give that one `a` more tokens.
Throughput rises if (N + a) / (T + Δ) > N / T, that is if a > N Δ / T: on an idle machine a wide step is nearly free
and almost any acceptance pays off; if the batch saturates the machine, none does.
"""

from __future__ import annotations

from collections import deque

_FORGET = 0.98
"""Weight of older measurements, per step."""
_WINDOW = 16
_JUDGED = 8
"""Verified steps before a request is judged."""
_REST, _LONGEST_REST = 32, 512
"""Tokens that a request generates without drafts after a switch-off; doubled each time drafts fail again."""


class Costs:
    """Step time as a linear function of its rows (least squares with forgetting), and the time of drafting."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0
        self._draft = 0.0

    def step(self, rows: int, seconds: float) -> None:
        """Record the time of a step without prefill."""
        self._count = self._count * _FORGET + 1
        self._rows = self._rows * _FORGET + rows
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + rows * rows
        self._products = self._products * _FORGET + rows * seconds

    def drafting(self, sequences: int, seconds: float) -> None:
        """Record the time of drafting for this many sequences."""
        self._draft += (1 - _FORGET) * (seconds / sequences - self._draft) if self._draft else seconds / sequences

    def break_even(self, sequences: int, drafts: float) -> float:
        """Accepted tokens per step above which `drafts` per step pay off for one of `sequences`; 0 before any
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
        # a line fitted to noise can leave no time for a plain step: then the time is split evenly over rows
        plain = max(plain, slope * sequences, 1e-9)
        return sequences * longer / plain


class Gate:
    """Whether one request currently speculates."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        self._rest = 0
        self._next_rest = _REST

    @property
    def open(self) -> bool:
        return self._rest == 0

    def rested(self, tokens: int) -> None:
        """Record tokens generated without drafts."""
        self._rest = max(0, self._rest - tokens)

    def verified(self, drafts: int, accepted: int, costs: Costs, sequences: int) -> None:
        """Record a step that verified drafts; closes the gate if recent drafts did not pay off."""
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
