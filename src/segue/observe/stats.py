"""Render workers' statistics for `/metrics` (Prometheus text exposition format 0.0.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from segue.messages.stats import Histogram, WorkerStats

_HELP = {
    "segue_stage_waiting": "Requests waiting in the stage's queue.",
    "segue_stage_running": "Requests the stage is working on.",
    "segue_stage_batch": "Size of the last batch.",
    "segue_stage_batch_size": "Sizes of the batches run.",
    "segue_stage_step_seconds": "Time of one engine step.",
    "segue_stage_first_output_seconds": "Time from a request's arrival in the stage to its first output.",
    "segue_stage_errors_total": "Requests that failed in the stage.",
    "segue_stage_spec_draft_tokens_total": "Draft tokens that were verified (speculative decoding).",
    "segue_stage_spec_accepted_tokens_total": "Draft tokens that were accepted.",
    "segue_stage_spec_switched_off_total": "Times drafting was switched off for a request because it did not pay.",
    "segue_stage_spec_active": "Whether the stage speculates: 0 after its drafter has failed.",
    "segue_stage_queue_age_seconds": "Time that the oldest request in the stage's queue has waited.",
    "segue_stage_requests": "Requests that are in the stage.",
    "segue_stage_retained_bytes": "Payloads the worker keeps in memory for recovery (reported for its first stage).",
    "segue_stage_spilled_bytes": "Payloads the worker keeps in its file for recovery (reported for its first stage).",
    "segue_stage_pool_bytes": "Shared memory of the worker that payloads occupy (reported for its first stage).",
    "segue_stage_shared_weight_bytes": "Weights shared with other workers (reported for the worker's first stage).",
    "segue_stage_coming_chunks": "Chunks whose payload is on its way (reported for the worker's first stage).",
    "segue_stage_early_chunks": "Chunks that came before their request (reported for the worker's first stage).",
    "segue_edge_in_flight_bytes": "Payload bytes sent and not consumed yet.",
    "segue_edge_pending_chunks": "Chunks that wait for space downstream.",
    "segue_edge_flows": "Requests whose stream over the edge is open.",
    "segue_edge_hop_seconds": "Time from a chunk's departure upstream to its arrival downstream.",
    "segue_edge_bytes_total": "Payload bytes sent over the edge.",
    "segue_edge_chunks_total": "Chunks sent over the edge.",
    "segue_edge_errors_total": "Payloads that could not be delivered.",
}


def render_worker_stats(stats: Iterable[WorkerStats]) -> bytes:
    """Return exposition text: each metric's HELP and TYPE lines, then all its samples.

    Raises `ValueError` if two workers report one name as a number and as a histogram.
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


def render_gauges(values: Mapping[str, tuple[str, float]]) -> bytes:
    """Return exposition text of values without labels: name → (help, value)."""
    return "".join(
        f"# HELP {name} {about}\n# TYPE {name} {_kind(name, value)}\n{name} {_number(value)}\n"
        for name, (about, value) in values.items()
    ).encode()


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
