"""Break down the time of each side by stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from segue.bench.harness.stats import HistogramFigures, histogram_figures, since, together
from segue.bench.omni.outcome import OmniSlice, Outcome
from segue.bench.omni.results import StageFigures
from segue.messages.stats import Histogram, WorkerStats

Snapshot = dict[tuple[str, str], Histogram]
"""(stage or edge, name) → histogram since the workers' start."""

UNITS = {"thinker": "tokens", "talker": "codes", "vocoder": "audio seconds"}


def snapshot(stats: Iterable[WorkerStats]) -> Snapshot:
    """All histograms of all stages and edges, summed over replicas."""
    found: dict[tuple[str, str], list[Histogram]] = {}
    for worker in stats:
        for owner, values in ((worker.stage, worker.values), *worker.edges.items()):
            for name, value in values.items():
                if isinstance(value, Histogram):
                    found.setdefault((owner, name), []).append(value)
    return {key: together(histograms) for key, histograms in found.items()}


def added(now: Snapshot, before: Snapshot) -> Snapshot:
    return {key: since(histogram, before.get(key)) for key, histogram in now.items()}


def hop_figures(between: Snapshot) -> dict[str, HistogramFigures]:
    """The figures of every edge that carried data."""
    hops = {edge: histogram_figures(value) for (edge, name), value in between.items() if name == "hop_seconds"}
    return {edge: figures for edge, figures in hops.items() if figures is not None}


def segue_stages(between: Snapshot, slices: Sequence[OmniSlice]) -> dict[str, StageFigures]:
    """Stage figures from the workers' step times."""
    made, wall = _made(slices), sum(taken.wall for taken in slices)
    stages = {}
    for (stage, name), steps in between.items():
        if name != "step_seconds":
            continue
        sizes = between.get((stage, "batch_size"))
        stages[stage] = _figures(
            stage,
            made,
            steps.sum,
            wall,
            histogram_figures(steps),
            None if sizes is None else histogram_figures(sizes),
        )
    return stages


def baseline_stages(slices: Sequence[OmniSlice]) -> dict[str, StageFigures]:
    """Stage figures from the times at which each batch left a stage; requests of one batch share them and count
    once."""
    made, wall = _made(slices), sum(taken.wall for taken in slices)
    busy: dict[str, float] = {}
    for taken in slices:
        seen = set()
        for outcome in taken.outcomes:
            for stage, what, start, end in outcome.spans:
                key = (stage, round(outcome.sent + end, 4))
                if what == "busy" and key not in seen:
                    seen.add(key)
                    busy[stage] = busy.get(stage, 0.0) + end - start
    return {stage: _figures(stage, made, seconds, wall, None, None) for stage, seconds in busy.items()}


def _made(slices: Sequence[OmniSlice]) -> dict[str, float]:
    outcomes: list[Outcome] = [outcome for taken in slices for outcome in taken.outcomes]
    return {
        "tokens": float(sum(len(outcome.text_ids) for outcome in outcomes)),
        "codes": float(sum(outcome.codes for outcome in outcomes)),
        "audio seconds": sum(outcome.audio_seconds for outcome in outcomes),
        "requests": float(len(outcomes)),
    }


def _figures(
    stage: str,
    made: dict[str, float],
    busy: float,
    wall: float,
    steps: HistogramFigures | None,
    batch: HistogramFigures | None,
) -> StageFigures:
    unit = UNITS.get(stage, "requests")
    return StageFigures(
        unit=unit,
        made=made[unit],
        busy=busy,
        per_busy_second=made[unit] / busy if busy else 0.0,
        utilisation=busy / wall,
        steps=steps,
        batch=batch,
    )
