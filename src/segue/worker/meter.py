"""What a worker counts: step times per stage, hops per edge, errors; sent to the orchestrator now and then."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from segue.messages.wire import Histogram, Stats

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
HOP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
HOP_BYTES = (64.0, 1024.0, 16384.0, 65536.0, 1048576.0, 16777216.0, 268435456.0)

Edge = tuple[str, str]


@dataclass(slots=True)
class _Counts:
    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def histogram(self) -> Histogram:
        running, cumulative = 0, []
        for count in self.counts:
            running += count
            cumulative.append(running)
        return Histogram(list(self.bounds), cumulative, self.total)


class Meter:
    """Counts since the worker's start."""

    def __init__(self, worker: str, stages: Iterable[str], edges: Iterable[Edge]) -> None:
        self._worker = worker
        self._steps = {stage: _Counts(STEP_SECONDS) for stage in stages}
        self._errors = dict.fromkeys(self._steps, 0)
        self._hop_seconds = {edge: _Counts(HOP_SECONDS) for edge in edges}
        self._hop_bytes = {edge: _Counts(HOP_BYTES) for edge in self._hop_seconds}
        self._changed = True
        self._reported = 0.0

    def stepped(self, stage: str, seconds: float) -> None:
        self._steps[stage].add(seconds)
        self._changed = True

    def failed(self, stage: str) -> None:
        self._errors[stage] += 1
        self._changed = True

    def hop(self, edge: Edge, seconds: float, nbytes: int) -> None:
        self._hop_seconds[edge].add(seconds)
        self._hop_bytes[edge].add(nbytes)
        self._changed = True

    def due(self, every: float) -> bool:
        """True if something changed and the last report is `every` seconds old."""
        return self._changed and time.monotonic() - self._reported >= every

    def changed(self) -> bool:
        return self._changed

    def report(self, engines: dict[str, dict[str, float]]) -> Stats:
        """The message for the orchestrator; `engines`: each stage's own stats."""
        self._changed, self._reported = False, time.monotonic()
        histograms = {stage: {"step_seconds": counts.histogram()} for stage, counts in self._steps.items()}
        for edge, seconds in self._hop_seconds.items():
            histograms["->".join(edge)] = {
                "hop_seconds": seconds.histogram(),
                "hop_bytes": self._hop_bytes[edge].histogram(),
            }
        stages = {stage: {**engines[stage], "errors": float(self._errors[stage])} for stage in self._steps}
        return Stats(self._worker, stages, histograms)
