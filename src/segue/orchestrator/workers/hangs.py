"""Find hanging workers: a worker with requests must answer pings within a limit.

Optional reading: the supervisor asks `HangWatch` which workers have been silent for too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from segue.orchestrator.workers.replicas import Replica


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one check for hanging workers."""

    ask: list[Replica] = field(default_factory=list)
    """Workers to ping."""
    kill: list[Replica] = field(default_factory=list)


class HangWatch:
    """Checks for hanging workers every `interval` seconds; the caller supplies the clock."""

    def __init__(self, limit: float, now: float) -> None:
        """`limit`: seconds within which a worker must answer."""
        self.limit = limit
        self.interval = limit / 4
        self._due = now

    def look(self, replicas: Sequence[Replica], now: float) -> Seen:
        """Find the replicas to ping and to kill. `Replica.pinged` records a ping until its answer is received."""
        # this call is late if something blocked the event loop (a caller's own code, or a machine that slept), during
        # which no answer could be received
        deaf = max(0.0, now - self._due)
        self._due = now + self.interval
        seen = Seen()
        for replica in replicas:
            if not replica.alive:
                continue
            if replica.pinged is None:
                if replica.requests:
                    replica.pinged = now
                    seen.ask.append(replica)
                continue
            replica.pinged += deaf
            if now - replica.pinged >= self.limit and replica.pid is not None:
                seen.kill.append(replica)
        return seen
