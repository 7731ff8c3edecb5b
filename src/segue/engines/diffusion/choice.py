"""Which samples take the next step together; a pure function.

The rule is *shortest remaining work first, with ageing*, within a priority (lower numbers first, as in every engine):

- the leader of a step is a sample of the request with the least work left, so that short requests do not wait for long
  ones (mean completion time is least so: Schrage, "A proof of the optimality of the shortest remaining processing
  time discipline", 1968);
- but a sample that has been passed over `patience` times in a row is *overdue*: while there are such, the one passed
  over most often leads;
- the call is filled up with samples of the leader's bucket, in the same order, while their rows fit.

The bound: between two steps of a sample lie at most `patience + n` steps of others, n being the other samples of its
priority that are there when it becomes overdue, where none of a lower number is ready. For: who leads is passed over no
more, so each of those n leads at most once before it, and who comes later has been passed over less often. (Samples of
a lower priority number that keep coming pass before it for ever; that is what priority means.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample that could take its next step now."""

    bucket: Hashable
    """Only equal ones share a call."""
    rows: int
    """Of its next call: one per guidance branch."""
    work: float
    """What is left to compute for its request, in any one unit."""
    priority: int
    arrival: int
    """Lower came earlier; different for each sample."""
    passed: int
    """Steps since its last one that it could have been in and was not."""


def choose(candidates: Sequence[Candidate], max_rows: Callable[[Candidate], int], patience: int) -> Sequence[Candidate]:
    """The samples of the next call, the leader first; none only where there are none.

    `max_rows`: most rows of a call that a candidate leads. The leader is taken whatever it says.
    """
    if not candidates:
        return []

    def order(candidate: Candidate) -> tuple[float, ...]:
        overdue = candidate.passed if candidate.passed >= patience else 0
        return (candidate.priority, -overdue, candidate.work, candidate.arrival)

    first, *others = sorted(candidates, key=order)
    chosen, rows, most = [first], first.rows, max_rows(first)
    for candidate in others:
        if candidate.bucket == first.bucket and rows + candidate.rows <= most:
            chosen.append(candidate)
            rows += candidate.rows
    return chosen
