"""In which order requests run: by arrival, by priority, or in fair shares between tenants.

A policy decides two things. `rank` orders the running sequences (who is served first in a step, and who is preempted
last) and never changes for a request, so that the first in rank always gets on. `Accounts` exist for fair sharing only
and decide whose waiting request is admitted next.

Fair sharing is the virtual token counter of Sheng et al., *Fairness in Serving Large Language Models* (OSDI 2024),
Algorithm 2: each tenant has a counter of the service it got, prompt tokens when a request is admitted and generated
tokens as they come; the tenant with the smallest counter admits its earliest request next. A tenant that comes back
after it had nothing waiting is lifted to the level of the others, so that nobody saves up service by staying away.
For two tenants that always have a request waiting, the service in any interval differs by at most
`2 * max(PROMPT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens the cache holds)` (Theorem 4.4).
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
"""From so many tenants on, those who are away are forgotten where that changes nothing."""


def rank(scheduling: str, priority: int, arrival: float, serial: int) -> Rank:
    """Lower runs first: by priority where that is the policy, then by arrival."""
    return (priority if scheduling == "priority" else 0, arrival, serial)


class Served(Protocol):
    """Of a sequence, what the accounts look at."""

    tenant: str
    rank: Rank
    length: int
    charged: int
    """Tokens of it that its tenant was charged for; recomputation after a preemption costs nothing more."""

    @property
    def runnable(self) -> bool: ...


S = TypeVar("S", bound=Served)


class Accounts:
    """The virtual token counters of all tenants."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self._waiting: frozenset[str] = frozenset()
        """Tenants that had a runnable request waiting when last looked at."""
        self._last = ""
        """The tenant admitted last."""

    def notice(self, waiting: Sequence[Served], running: Iterable[Served]) -> None:
        """Lift the counters of tenants that have something waiting now and had nothing before. Doing it twice changes
        nothing."""
        # in order of rank, each counts for the lift of those after it, as if they arrived one by one
        for tenant in dict.fromkeys(job.tenant for job in waiting if job.runnable):
            if tenant not in self._waiting:
                if tenant not in self.counters and len(self.counters) >= _REMEMBERED:
                    self._forget({job.tenant for jobs in (waiting, running) for job in jobs})
                self.counters[tenant] = max(self.counters.get(tenant, 0), self._level())
                self._waiting |= {tenant}
        self._waiting = frozenset(job.tenant for job in waiting if job.runnable)

    def _level(self) -> float:
        """To which a tenant is lifted that comes back."""
        if self._waiting:
            return min(self.counters[tenant] for tenant in self._waiting)
        return self.counters.get(self._last, 0)

    def _forget(self, present: set[str]) -> None:
        """Drop absent tenants whose counters would be lifted anyway."""
        level = self._level()
        keep = {*present, *self._waiting, self._last}
        self.counters = {name: count for name, count in self.counters.items() if name in keep or count > level}

    def order(self, waiting: Iterable[S], admitted: Callable[[S], bool]) -> Iterator[S]:
        """Runnable waiting requests as they should be admitted. `admitted` says whether the one given last was."""
        queues: dict[str, deque[S]] = {}
        for job in waiting:
            if job.runnable:
                queues.setdefault(job.tenant, deque()).append(job)
        counters = {tenant: self.counters.get(tenant, 0) for tenant in queues}
        while queues:
            tenant = min(queues, key=lambda name: (counters[name], queues[name][0].rank))
            job = queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            yield job
            if admitted(job):
                counters[tenant] += _prompt_cost(job)

    def admit(self, job: Served) -> None:
        """The request is in the batch: its prompt is charged, unless it was there before."""
        self.counters[job.tenant] = self.counters.get(job.tenant, 0) + _prompt_cost(job)
        job.charged = job.charged or job.length
        self._last = job.tenant

    def generated(self, job: Served, tokens: int) -> None:
        """The sequence has so many tokens now (known, and about to be drawn)."""
        new = max(0, tokens - job.charged)
        self.counters[job.tenant] = self.counters.get(job.tenant, 0) + OUTPUT_WEIGHT * new
        job.charged += new


def _prompt_cost(job: Served) -> float:
    return 0.0 if job.charged else PROMPT_WEIGHT * job.length
