"""Who hangs: workers that have something to do owe a sign of life, and some have owed it for too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from segue.orchestrator.replicas import Replica


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look has found."""

    ask: list[Replica] = field(default_factory=list)
    """For a sign of life."""
    kill: list[Replica] = field(default_factory=list)


class HangWatch:
    """Looks at the workers every `interval` seconds, by the clock of whoever asks it to."""

    def __init__(self, limit: float, now: float) -> None:
        """`limit`: seconds for which a worker may owe an answer."""
        self.limit = limit
        self.interval = limit / 4
        self._due = now

    def look(self, replicas: Sequence[Replica], now: float) -> Seen:
        """Notes in `Replica.pinged` who is asked now; whoever hears an answer clears it."""
        # this is late where something held up the event loop (a caller's own code, or a machine that slept): nobody
        # heard what workers said meanwhile
        deaf = max(0.0, now - self._due)
        self._due = now + self.interval
        seen = Seen()
        for replica in replicas:
            if replica.state != "ready":
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
