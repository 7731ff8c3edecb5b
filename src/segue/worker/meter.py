"""A worker's metrics: step times and errors per stage, hops per edge; sent to the orchestrator periodically.

Optional reading: a worker tells its `Meter` what it did.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from segue.messages.stats import LATENCY_BOUNDS, SIZE_BOUNDS, Histogram, Values, WorkerStats
from segue.messages.wire import Stats

HOP_BOUNDS = (0.0001, 0.00025, 0.0005, *LATENCY_BOUNDS[:-2])

Edge = tuple[str, str]


class Meter:
    """Counts events since the worker's start. `edges`: those that lead to one of `stages`."""

    def __init__(self, worker: str, replica: int, stages: Iterable[str], edges: Iterable[Edge]) -> None:
        self._worker = worker
        self._replica = replica
        self._steps = {stage: Histogram.empty() for stage in stages}
        self._batches = {stage: Histogram.empty(SIZE_BOUNDS) for stage in self._steps}
        self._queues = {stage: Histogram.empty() for stage in self._steps}
        self._errors = dict.fromkeys(self._steps, 0.0)
        self._hops = {edge: Histogram.empty(HOP_BOUNDS) for edge in edges}
        self._bytes = dict.fromkeys(self._hops, 0.0)
        self._lost = dict.fromkeys(self._hops, 0.0)
        self._changed = True
        self._reported = 0.0

    def stepped(self, stage: str, seconds: float, batch: float) -> None:
        self._steps[stage].observe(seconds)
        self._batches[stage].observe(batch)
        self._changed = True

    def queued(self, stage: str, seconds: float) -> None:
        """Record how long a request waited for its first output."""
        self._queues[stage].observe(seconds)

    def failed(self, stage: str) -> None:
        self._errors[stage] += 1
        self._changed = True

    def hop(self, edge: Edge, seconds: float, nbytes: int) -> None:
        self._hops[edge].observe(seconds)
        self._bytes[edge] += nbytes
        self._changed = True

    def lost(self, edge: Edge) -> None:
        """Record a payload that could not be fetched."""
        self._lost[edge] += 1
        self._changed = True

    def touch(self) -> None:
        """Record that something changed, so that a report is sent."""
        self._changed = True

    def due(self, every: float) -> bool:
        """Whether something changed and the last report is at least `every` seconds old."""
        return self._changed and time.monotonic() - self._reported >= every

    def changed(self) -> bool:
        return self._changed

    def report(
        self,
        engines: Mapping[str, Mapping[str, float]],
        held: Mapping[str, float],
        leaving: Mapping[Edge, Mapping[str, float]],
    ) -> Stats:
        """Make the message for the orchestrator. `engines`: each stage's own stats; `held`: gauges of the whole worker,
        reported for its first stage; `leaving`: gauges of edges that leave it."""
        self._changed, self._reported = False, time.monotonic()
        stages = [self._stage(stage, engines[stage]) for stage in self._steps]
        stages[0].values.update(held)
        for stage in stages:
            stage.edges.update(
                {"->".join(edge): dict(values) for edge, values in leaving.items() if edge[0] == stage.stage}
            )
        return Stats(self._worker, stages)

    def _stage(self, stage: str, engine: Mapping[str, float]) -> WorkerStats:
        values: Values = {
            **engine,
            "step_seconds": self._steps[stage],
            "batch_size": self._batches[stage],
            "first_output_seconds": self._queues[stage],
            "errors_total": self._errors[stage],
        }
        edges: dict[str, Values] = {
            "->".join(edge): {
                "hop_seconds": hops,
                "bytes_total": self._bytes[edge],
                "chunks_total": float(sum(hops.counts)),
                "errors_total": self._lost[edge],
            }
            for edge, hops in self._hops.items()
            if edge[1] == stage
        }
        return WorkerStats(stage, self._replica, values, edges)
