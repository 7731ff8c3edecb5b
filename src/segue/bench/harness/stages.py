"""What the stages of a side did, from what Segue's workers report and from the timelines of requests, with tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from segue.bench.harness.meters import SideUsage
from segue.bench.harness.report import NamedColumns, table
from segue.bench.harness.stats import HistogramFigures, Snapshot, histogram_figures

Span = tuple[str, str, float, float]
"""(stage, activity, start, end): a part of a request's timeline, in seconds."""


class StageFigures(msgspec.Struct, kw_only=True):
    """One stage of one side, over all rounds."""

    unit: str
    made: float
    """Amount of output: tokens, codes, seconds of audio."""
    busy: float
    """Seconds in which the stage computed."""
    per_busy_second: float
    utilisation: float
    """Busy share of the side's wall time."""
    steps: HistogramFigures | None = None
    batch: HistogramFigures | None = None


def stage_figures(
    unit: str,
    made: float,
    busy: float,
    wall: float,
    steps: HistogramFigures | None = None,
    batch: HistogramFigures | None = None,
) -> StageFigures:
    """`wall`: seconds in which the side worked."""
    return StageFigures(
        unit=unit,
        made=made,
        busy=busy,
        per_busy_second=made / busy if busy else 0.0,
        utilisation=busy / wall,
        steps=steps,
        batch=batch,
    )


def busy_seconds(timelines: Iterable[tuple[float, Iterable[Span]]]) -> dict[str, float]:
    """Stage → seconds in which it was busy, from requests' times of sending and their timelines. Requests of one batch
    share its times, which count once."""
    busy: dict[str, float] = {}
    seen = set()
    for sent, spans in timelines:
        for stage, what, start, end in spans:
            key = (stage, round(sent + end, 4))
            if what == "busy" and key not in seen:
                seen.add(key)
                busy[stage] = busy.get(stage, 0.0) + end - start
    return busy


def hop_figures(between: Snapshot) -> dict[str, HistogramFigures]:
    """The figures of every edge that carried data."""
    hops = {edge: histogram_figures(value) for (edge, name), value in between.items() if name == "hop_seconds"}
    return {edge: figures for edge, figures in hops.items() if figures is not None}


def stage_table(sides: Mapping[str, Mapping[str, StageFigures]]) -> str:
    """`sides`: side → stage → its figures."""
    rows = [
        [
            side,
            stage,
            f"{one.per_busy_second:.1f} {one.unit}/s",
            f"{one.utilisation:.0%}",
            ""
            if (steps := one.steps) is None
            else f"{steps.count} × {1e3 * steps.mean:.1f} ms (p99 {1e3 * steps.p99:.0f})",
            "" if one.batch is None else f"{one.batch.mean:.1f}",
        ]
        for side, stages in sides.items()
        for stage, one in stages.items()
    ]
    return table(["side", "stage", "while busy", "busy", "steps", "batch"], rows)


HOP_COLUMNS: NamedColumns[HistogramFigures] = {
    "chunks": lambda edge, one: str(one.count),
    "mean (ms)": lambda edge, one: f"{1000 * one.mean:.2f}",
    "p50 (ms)": lambda edge, one: f"{1000 * one.p50:.2f}",
    "p99 (ms)": lambda edge, one: f"{1000 * one.p99:.2f}",
}
USAGE_COLUMNS: NamedColumns[SideUsage] = {
    "peak memory (PSS)": lambda side, one: f"{one.peak_pss_bytes / 2**20:.0f} MiB",
    "CPU seconds by process": lambda side, one: ", ".join(f"{who} {took:.1f}" for who, took in one.cpu_seconds.items()),
    "CPU seconds of the others meanwhile": lambda side, one: f"{one.others_cpu_seconds:.1f}",
}
