"""Results of `segue bench hosts`, their report, and docs/scale.md: what the figures mean for numbers of workers, hosts
and requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.bench.harness.report import Columns, of_run, page, table, table_of
from segue.bench.harness.results import Growing
from segue.bench.harness.stats import Ratio, Summary

MEMCPY, BARE = "memcpy", "bare socket"
WORK = (0.01, 0.1, 1.0, 10.0)
"""Worker-seconds of a request that the tables of docs/scale.md reckon with."""
ROW_BYTES = 4 * 3584
"""A hidden state of Qwen2.5-Omni-7B's thinker in float32."""


class HopRow(msgspec.Struct):
    """One way of a payload of `bytes` bytes."""

    bytes: int
    way: str
    median_ms: float
    p90_ms: float
    of_bare: float
    """Median over rounds of its time divided by that round's bare socket."""
    of_memcpy: float

    @property
    def per_second(self) -> float:
        """Bytes, payload after payload."""
        return self.bytes / (self.median_ms / 1e3)


class JctRow(msgspec.Struct):
    """One side at one number of clients. `ratio`: its JCT by that on one host; `equal`: share of requests with the
    same reply and codes as there."""

    clients: int
    side: str
    jct: Summary
    ttfa: Summary
    ratio: Ratio
    equal: float


class LossRow(msgspec.Struct):
    """Requests while the other host is killed, against the same requests undisturbed. Seconds."""

    clients: int
    requests: int
    undisturbed: Summary
    """JCT."""
    lost: Summary
    delay: Summary
    """Of each request: its JCT when the host was lost, less its JCT undisturbed."""
    wall: float
    """Mean of all rounds, from the first request to the last answer; undisturbed."""
    wall_lost: float
    back: Summary
    """From the start of the host's agent until its workers served again."""
    equal: float
    """Share of requests with the same reply and codes."""


class LimitRow(msgspec.Struct, kw_only=True):
    """The orchestrator with simulated workers."""

    workers: int
    steps: int
    """Emissions of a request's autoregressive stage, each in a message of its own."""
    together: int
    """Clients of the closed loop."""
    cores: int
    """That all processes shared."""
    per_second: float
    """Requests."""
    cpu_us: float
    """CPU time of the orchestrator's process per request, its clients included. Microseconds."""
    workers_cpu_us: float
    """CPU time of the simulated workers' process per request."""
    messages: float
    """Messages to and from workers, per request."""
    jct: Summary
    profile: list[tuple[str, float]] = []
    """Function → its share of the orchestrator's own time under a profiler, the largest first."""


class HostsResult(Growing, kw_only=True):
    benchmark: str = "hosts"
    network: str
    """What the hosts are."""
    model: str
    requests: int
    """Per round and side."""
    rounds: int
    hop_rounds: int
    hops: list[HopRow] = msgspec.field(default_factory=list)
    jct: list[JctRow] = msgspec.field(default_factory=list)
    losses: list[LossRow] = msgspec.field(default_factory=list)
    limits: list[LimitRow] = msgspec.field(default_factory=list)


def size_of(count: int) -> str:
    """Return a number of bytes in words: `4 KiB`, `10 MiB`."""
    return f"{count / 2**20:g} MiB" if count >= 1 << 20 else f"{count / 2**10:g} KiB"


def hop_table(rows: Sequence[HopRow]) -> str:
    """A line per size, a column per way: milliseconds, and in brackets how many times the bare socket."""
    ways = list(dict.fromkeys(row.way for row in rows))
    cells = {(row.bytes, row.way): row for row in rows}

    def cell(row: HopRow | None) -> str:
        if row is None:
            return "–"
        return f"{row.median_ms:.2f}" if row.way in (MEMCPY, BARE) else f"{row.median_ms:.2f} ({row.of_bare:.2f}×)"

    sizes = dict.fromkeys(row.bytes for row in rows)
    lines = [[size_of(size), *(cell(cells.get((size, way))) for way in ways)] for size in sizes]
    return table(["payload", *ways], lines)


_JCT: Columns[JctRow] = {
    "clients": lambda row: str(row.clients),
    "side": lambda row: row.side,
    "JCT p50, s": lambda row: f"{row.jct.p50:.2f}",
    "JCT p99, s": lambda row: f"{row.jct.p99:.2f}",
    "first audio p50, s": lambda row: f"{row.ttfa.p50:.2f}",
    "JCT of one host's": lambda row: f"{row.ratio.mean:.2f} ({row.ratio.low:.2f}–{row.ratio.high:.2f})×",
    "equal answers": lambda row: f"{row.equal:.0%}",
}
_LOSSES: Columns[LossRow] = {
    "clients": lambda row: str(row.clients),
    "requests": lambda row: str(row.requests),
    "JCT p50 undisturbed, s": lambda row: f"{row.undisturbed.p50:.2f}",
    "with a lost host, s": lambda row: f"{row.lost.p50:.2f}",
    "delay mean, s": lambda row: f"{row.delay.mean:.2f}",
    "delay worst, s": lambda row: f"{row.delay.worst:.2f}",
    "all answered, s": lambda row: f"{row.wall:.1f}",
    "with a lost host": lambda row: f"{row.wall_lost:.1f}",
    "host serves again, s": lambda row: f"{row.back.p50:.1f}",
    "equal answers": lambda row: f"{row.equal:.0%}",
}
_LIMITS: Columns[LimitRow] = {
    "workers": lambda row: str(row.workers),
    "steps": lambda row: str(row.steps),
    "requests/s": lambda row: f"{row.per_second:.0f}",
    "orchestrator's CPU per request, µs": lambda row: f"{row.cpu_us:.0f}",
    "workers' CPU per request, µs": lambda row: f"{row.workers_cpu_us:.0f}",
    "messages per request": lambda row: f"{row.messages:.0f}",
    "JCT p50, ms": lambda row: f"{row.jct.p50 * 1e3:.1f}",
    "JCT p99, ms": lambda row: f"{row.jct.p99 * 1e3:.1f}",
}

_NETWORK: Columns[HopRow] = {
    "payload": lambda row: size_of(row.bytes),
    "connector": lambda row: row.way,
    "hop, ms": lambda row: f"{row.median_ms:.2f}",
    "of a bare socket": lambda row: f"{row.of_bare:.2f}×",
    "MiB/s": lambda row: f"{row.per_second / 2**20:,.0f}",
    "rows of 3,584 float32 per s": lambda row: f"{row.per_second / ROW_BYTES:,.0f}",
}
"""What one edge carries between two hosts."""


def bound_table(rows: Sequence[LimitRow]) -> str:
    """Where the orchestrator's time went, with the most workers that were profiled; empty if none were."""
    profiled = [row for row in rows if row.profile]
    if not profiled:
        return ""
    last = max(profiled, key=lambda row: row.workers)
    shares = [[f"`{name}`", f"{share:.0%}"] for name, share in last.profile]
    return table([f"function, at {last.workers} workers", "share of the time"], shares)


def markdown(result: HostsResult) -> str:
    parts = [f"{of_run(result)} The hosts: {result.network}.", *result.unfinished]
    if result.hops:
        parts += [
            f"A hop, median of {result.hop_rounds} rounds in ms, and how many times the bare socket of the same round:",
            hop_table(result.hops),
        ]
    if result.jct:
        parts += [
            f"Speech from mixed media ({result.model}), {result.rounds} rounds of {result.requests} requests a side:",
            table_of(result.jct, _JCT),
        ]
    if result.losses:
        parts += ["The other host is killed (SIGKILL) while requests run:", table_of(result.losses, _LOSSES)]
    if result.limits:
        cores, clients = result.limits[0].cores, result.limits[0].together
        where = f"{clients} clients, all on {cores} core{'s' if cores > 1 else ''}:"
        parts.append(f"The orchestrator with simulated workers that answer at once, {where}")
        parts += [table_of(result.limits, _LIMITS), bound_table(result.limits)]
    return page(parts)


# ── docs/scale.md ────────────────────────────────────────────────────────────────────────────────────────────────────


def scale(results: Sequence[HostsResult]) -> str:
    """Return the generated part of the page, from the last result of each part."""
    parts = []
    limits = next((result.limits for result in reversed(results) if result.limits), [])
    hops = next((result.hops for result in reversed(results) if result.hops), [])
    losses = next((result.losses for result in reversed(results) if result.losses), [])
    if limits:
        parts += ["### One orchestrator", table_of(limits, _LIMITS), "### Workers and requests", workers_table(limits)]
    if hops:
        remote = [row for row in hops if row.way in ("tcp", "tcp, bfloat16")]
        parts += ["### The network", table_of(remote, _NETWORK)]
    if losses:
        worst = max(row.delay.worst for row in losses)
        typical = max(row.delay.p50 for row in losses)
        half = f"less than {typical:.1f} s" if typical > 0.05 else "no longer than undisturbed"
        parts += [
            "### A lost host",
            f"Requests that ran while a host was killed took at most {worst:.1f} s longer; half of them, {half}.",
        ]
    return "\n\n".join(parts) or "There are no figures yet: `segue bench hosts` makes them."


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
