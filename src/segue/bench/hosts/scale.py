"""docs/scale.md: what the figures of `segue bench hosts` mean for numbers of workers, hosts and requests."""

from __future__ import annotations

from collections.abc import Sequence

from segue.bench.harness.report import table
from segue.bench.hosts.results import HopRow, HostsResult, LimitRow, limit_table, size_of

WORK = (0.01, 0.1, 1.0, 10.0)
"""Worker-seconds of a request that the tables reckon with."""
ROW_BYTES = 4 * 3584
"""A hidden state of Qwen2.5-Omni-7B's thinker in float32."""
_ABSENT = "There are no figures yet: `segue bench hosts` makes them."


def scale(results: Sequence[HostsResult]) -> str:
    """Return the generated part of the page, from the last result of each part."""
    parts = []
    limits = next((result.limits for result in reversed(results) if result.limits), [])
    hops = next((result.hops for result in reversed(results) if result.hops), [])
    losses = next((result.losses for result in reversed(results) if result.losses), [])
    if limits:
        parts += ["### One orchestrator", limit_table(limits), "### Workers and requests", workers_table(limits)]
    if hops:
        parts += ["### The network", network_table(hops)]
    if losses:
        worst = max(row.delay.worst for row in losses)
        typical = max(row.delay.p50 for row in losses)
        half = f"less than {typical:.1f} s" if typical > 0.05 else "no longer than undisturbed"
        parts += [
            "### A lost host",
            f"Requests that ran while a host was killed took at most {worst:.1f} s longer; half of them, {half}.",
        ]
    return "\n\n".join(parts) or _ABSENT


def workers_table(limits: Sequence[LimitRow]) -> str:
    """Requests per second that so many workers serve, by the worker-seconds of a request; or what the orchestrator
    carries, if that is less."""
    fewest = min(row.steps for row in limits)
    rows = [row for row in limits if row.steps == fewest]

    def cell(row: LimitRow, work: float) -> str:
        served = row.workers / work
        if served >= row.per_second:
            return f"**{row.per_second:,.0f}**"
        shown = f"{served:,.0f}" if served >= 10 else f"{served:g}"
        return f"{shown} ({served / row.per_second:.0%})"

    head = ["workers", *(f"{work:g} worker-seconds" for work in WORK)]
    return table(head, [[str(row.workers), *(cell(row, work) for work in WORK)] for row in rows])


def network_table(hops: Sequence[HopRow]) -> str:
    """What one edge carries between two hosts, payload after payload."""
    kept = [row for row in hops if row.way in ("tcp", "tcp, bfloat16")]

    def line(row: HopRow) -> list[str]:
        per_second = row.bytes / (row.median_ms / 1e3)
        return [
            size_of(row.bytes),
            row.way,
            f"{row.median_ms:.2f}",
            f"{row.of_bare:.2f}×",
            f"{per_second / 2**20:,.0f}",
            f"{per_second / ROW_BYTES:,.0f}",
        ]

    head = ["payload", "connector", "hop, ms", "of a bare socket", "MiB/s", "rows of 3,584 float32 per s"]
    return table(head, [line(row) for row in kept])
