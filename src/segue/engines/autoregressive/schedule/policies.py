"""Scheduling policies: by arrival, by priority, or in fair shares between tenants.

A policy decides two things. `rank` orders the running sequences: the first is served first and preempted last. A
request's rank never changes, so the first in rank always makes progress. `Accounts` exist only for fair sharing and
decide whose waiting request is admitted next.

Fair sharing is the virtual token counter of Sheng et al., *Fairness in Serving Large Language Models* (OSDI 2024),
Algorithm 2. Each tenant has a counter of the service it received: prompt tokens count when a request is admitted,
generated tokens as they are generated. The tenant with the smallest counter admits its earliest request next. A tenant
that had nothing waiting is lifted to the level of the others when it returns, so that absence saves up no service.
For two tenants that always have a request waiting, the service in any interval differs by at most
`2 * max(PROMPT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens the cache holds)` (Theorem 4.4). A tenant's
charges are divided by its share (the paper's weighted form, §4.3), so that service is in proportion to shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

Rank = tuple[int, float, int]

PROMPT_WEIGHT = 1.0
"""Service of one prompt token (w_p in the paper, §3.1)."""
OUTPUT_WEIGHT = 2.0
"""Service of one generated token (w_q)."""
_REMEMBERED = 1000
"""From this many tenants on, absent tenants are forgotten if that changes no decision."""


def rank(scheduling: str, priority: int, arrival: float, serial: int) -> Rank:
    """Lower runs first: by priority where that is the policy, then by arrival."""
    return (priority if scheduling == "priority" else 0, arrival, serial)


class Served(Protocol):
    """Attributes of a sequence that the accounts read."""

    tenant: str
    share: float
    """The tenant's share: service counts for 1 / share of itself."""
    rank: Rank
    length: int
    charged: int
    """Tokens already charged to its tenant; recomputation after a preemption costs nothing more."""
    appended: int
    """Tokens of later input among those that are not charged yet: each counts as a prompt token."""

    @property
    def runnable(self) -> bool: ...


S = TypeVar("S", bound=Served)


class Accounts:
    """The virtual token counters of all tenants."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self._waiting: frozenset[str] = frozenset()
        """Tenants that had a runnable request waiting at the last `notice`."""
        self._last = ""
        """The tenant admitted last."""

    def notice(self, waiting: Sequence[Served], running: Iterable[Served]) -> None:
        """Lift the counters of tenants that have a waiting request now and had none before. Calling it twice changes
        nothing."""
        # in order of rank: each tenant counts for the lift of those after it, as if they arrived one by one
        for tenant in dict.fromkeys(sequence.tenant for sequence in waiting if sequence.runnable):
            if tenant not in self._waiting:
                if tenant not in self.counters and len(self.counters) >= _REMEMBERED:
                    self._forget({sequence.tenant for sequences in (waiting, running) for sequence in sequences})
                self.counters[tenant] = max(self.counters.get(tenant, 0), self._level())
                self._waiting |= {tenant}
        self._waiting = frozenset(sequence.tenant for sequence in waiting if sequence.runnable)

    def _level(self) -> float:
        """Counter value to which a returning tenant is lifted."""
        if self._waiting:
            return min(self.counters[tenant] for tenant in self._waiting)
        return self.counters.get(self._last, 0)

    def _forget(self, present: set[str]) -> None:
        """Drop absent tenants whose counters would be lifted anyway."""
        level = self._level()
        keep = {*present, *self._waiting, self._last}
        self.counters = {name: count for name, count in self.counters.items() if name in keep or count > level}

    def order(self, waiting: Iterable[S], admitted: Callable[[S], bool]) -> Iterator[S]:
        """Yield runnable waiting requests in order of admission. `admitted` says whether the previous one was."""
        queues: dict[str, deque[S]] = {}
        for sequence in waiting:
            if sequence.runnable:
                queues.setdefault(sequence.tenant, deque()).append(sequence)
        counters = {tenant: self.counters.get(tenant, 0) for tenant in queues}
        while queues:
            tenant = min(queues, key=lambda name: (counters[name], queues[name][0].rank))
            sequence = queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            yield sequence
            if admitted(sequence):
                counters[tenant] += _prompt_cost(sequence)

    def admit(self, sequence: Served) -> None:
        """Charge the prompt of an admitted request, unless it was admitted before."""
        self.counters[sequence.tenant] = self.counters.get(sequence.tenant, 0) + _prompt_cost(sequence)
        if not sequence.charged:
            sequence.charged, sequence.appended = sequence.length, 0
        self._last = sequence.tenant

    def generated(self, sequence: Served, tokens: int) -> None:
        """Charge a sequence that has `tokens` tokens now (known ones, and one about to be drawn)."""
        new = max(0, tokens - sequence.charged)
        given = min(new, sequence.appended)
        service = PROMPT_WEIGHT * given + OUTPUT_WEIGHT * (new - given)
        self.counters[sequence.tenant] = self.counters.get(sequence.tenant, 0) + service / sequence.share
        sequence.charged += new
        sequence.appended -= given


def _prompt_cost(sequence: Served) -> float:
    return 0.0 if sequence.charged else PROMPT_WEIGHT * sequence.length / sequence.share
