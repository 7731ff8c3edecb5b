"""What a worker reports of itself, as it crosses to the orchestrator."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds; upper ends of the buckets."""
SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Batch sizes, queue lengths."""


class Histogram(msgspec.Struct):
    """Counts per bucket, as a worker keeps and sends them. `counts[i]`: values ≤ `bounds[i]`; the last: above all."""

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
"""By name. A name that ends in `_total` is a counter, another number a gauge. Units end the name: `_seconds`."""


class WorkerStats(msgspec.Struct):
    """Of one replica of one stage."""

    stage: str
    replica: int
    values: Values = {}
    """→ `segue_stage_<name>{stage, replica}`"""
    edges: dict[str, Values] = {}
    """By edge, `thinker->talker` → `segue_edge_<name>{stage, replica, edge}`"""
