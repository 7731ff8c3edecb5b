"""What a worker reports of itself, and how it reads in `/metrics` (Prometheus text exposition format 0.0.4)."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping

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


_HELP = {
    "segue_stage_waiting": "Requests waiting in the stage's queue.",
    "segue_stage_running": "Requests the stage is working on.",
    "segue_stage_batch": "Size of the last batch.",
    "segue_stage_batch_size": "Sizes of the batches run.",
    "segue_stage_step_seconds": "Time of one engine step.",
    "segue_stage_queue_seconds": "Time a request waited in the stage before its first step.",
    "segue_stage_errors_total": "Requests that failed in the stage.",
    "segue_edge_hop_seconds": "Time from a chunk's departure upstream to its arrival downstream.",
    "segue_edge_bytes_total": "Payload bytes sent over the edge.",
    "segue_edge_chunks_total": "Chunks sent over the edge.",
    "segue_edge_errors_total": "Payloads that could not be delivered.",
}


def render_worker_stats(stats: Iterable[WorkerStats]) -> bytes:
    """Exposition text: the samples of each metric together, each with its HELP and TYPE.

    Raises `ValueError` where two workers report one name as a number and as a histogram.
    """
    kinds: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for worker in stats:
        labels = {"stage": worker.stage, "replica": str(worker.replica)}
        sets = [("segue_stage_", labels, worker.values)]
        sets += [("segue_edge_", {**labels, "edge": edge}, values) for edge, values in worker.edges.items()]
        for prefix, its_labels, values in sets:
            for name, value in values.items():
                metric = prefix + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                kind = _kind(metric, value)
                if kinds.setdefault(metric, kind) != kind:
                    raise ValueError(f"{metric} is a {kinds[metric]} in one worker and a {kind} in another")
                lines.setdefault(metric, []).extend(_samples(metric, its_labels, value))
    out = []
    for metric in sorted(lines):
        out.append(f"# HELP {metric} {_HELP.get(metric, 'Reported by the worker.')}")
        out.append(f"# TYPE {metric} {kinds[metric]}")
        out.extend(lines[metric])
    return "".join(f"{line}\n" for line in out).encode()


def _kind(metric: str, value: float | Histogram) -> str:
    if isinstance(value, Histogram):
        return "histogram"
    return "counter" if metric.endswith("_total") else "gauge"


def _samples(metric: str, labels: Mapping[str, str], value: float | Histogram) -> list[str]:
    if not isinstance(value, Histogram):
        return [f"{metric}{_labels(labels)} {_number(value)}"]
    out, seen = [], 0
    for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
        seen += count
        out.append(f"{metric}_bucket{_labels({**labels, 'le': _number(bound)})} {seen}")
    return [*out, f"{metric}_sum{_labels(labels)} {_number(value.sum)}", f"{metric}_count{_labels(labels)} {seen}"]


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
