"""Statistics that a worker reports to the orchestrator."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of latency buckets, in seconds."""
SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Upper bounds of buckets for batch sizes and queue lengths."""


class Histogram(msgspec.Struct):
    """Counts per bucket, as a worker keeps and sends them. `counts[i]`: values ≤ `bounds[i]`; the last: all above."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...] = LATENCY_BOUNDS) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


Values = dict[str, float | Histogram]
"""By name. A number whose name ends in `_total` is a counter, any other a gauge. Names end in a unit: `_seconds`."""


class WorkerStats(msgspec.Struct):
    """Statistics of one replica of one stage."""

    stage: str
    replica: int
    values: Values = {}
    """→ `segue_stage_<name>{stage, replica}`"""
    edges: dict[str, Values] = {}
    """By edge, `thinker->talker` → `segue_edge_<name>{stage, replica, edge}`"""
