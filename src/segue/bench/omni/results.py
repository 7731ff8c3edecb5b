"""The result of `segue bench omni`, in the format of its JSON file, and its computation from outcomes and from what
Segue's workers report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from segue.bench.harness.load import outcomes_of
from segue.bench.harness.meters import SideUsage
from segue.bench.harness.results import Growing
from segue.bench.harness.stats import (
    HistogramFigures,
    Ratio,
    Snapshot,
    Summary,
    histogram_figures,
    mean,
    ratio,
    summary,
)
from segue.bench.omni.outcome import OmniSlice, Outcome, WrongWork

METRICS: dict[str, Callable[[Outcome], float]] = {
    "jct": lambda outcome: outcome.jct,
    "ttft": lambda outcome: outcome.ttft,
    "ttfa": lambda outcome: outcome.ttfa,
    "rtf": lambda outcome: outcome.rtf,
}
"""Compared figures of a request."""
LEAST_AGREEMENT = 0.5
SAME_LENGTH = 0.001
"""Seconds by which the audio of two sides may differ."""
UNITS = {"thinker": "tokens", "talker": "codes", "vocoder": "audio seconds"}


class Settings(msgspec.Struct, kw_only=True):
    """Settings of the run."""

    model: str
    workload: str = "mixed"
    device: str
    dtype: str
    load_format: str
    seed: int
    requests: int
    """Requests per round and side."""
    rounds: int
    warmup: int
    sides: list[str]
    threads: dict[str, dict[str, int]]
    """Side → process → CPU threads."""
    silence: float
    environment: dict[str, str] = {}
    """Environment variables of all sides' processes; empty in older files, where only Segue's workers had any."""


class SideFigures(msgspec.Struct, kw_only=True):
    """One side at one concurrency."""

    requests: int
    wall: float
    """Seconds in which this side worked, all rounds together."""
    metrics: dict[str, Summary]
    throughput: dict[str, float]
    """Per second of wall time: `requests`, `reply_tokens`, `codes`, `audio_seconds`."""
    by_kind: dict[str, float]
    """Mean JCT of text, image, audio and video requests."""


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


class LevelResult(msgspec.Struct, kw_only=True):
    """All sides at one concurrency."""

    concurrency: int
    """Clients of a closed loop; 0 for Poisson arrivals."""
    rate: float = 0.0
    """Arrivals per second."""
    sides: dict[str, SideFigures]
    ratios: dict[str, dict[str, Ratio]]
    """Baseline → metric → Segue's figure divided by the baseline's."""
    agreement: dict[str, dict[str, float]]
    """Baseline → share of equal replies and codes."""
    stages: dict[str, dict[str, StageFigures]]
    """Side → stage."""
    hops: dict[str, HistogramFigures]
    """Segue's edges: seconds from sending a chunk to its arrival."""
    usage: dict[str, SideUsage]
    batches: dict[str, float]
    """Baseline → mean batch size of a request."""
    outcomes: dict[str, list[Outcome]]
    """Side → every request's outcome, without token ids."""

    @property
    def load(self) -> str:
        """The load in words."""
        return load_name(self.concurrency, self.rate)


class Result(Growing, kw_only=True):
    benchmark: str = "omni"
    settings: Settings
    levels: list[LevelResult]
    gpu_peak_bytes: dict[str, int] = msgspec.field(default_factory=dict)


def load_name(clients: int, rate: float) -> str:
    """`8 clients`, or `0.1 arrivals/s` for no clients of a closed loop."""
    if not clients:
        return f"{rate:g} arrivals/s"
    return "1 client" if clients == 1 else f"{clients} clients"


def figures(slices: Sequence[OmniSlice]) -> SideFigures:
    """The figures of one side's slices."""
    outcomes = outcomes_of(slices)
    wall = sum(taken.wall for taken in slices)
    made = {
        "requests": float(len(outcomes)),
        "reply_tokens": float(sum(len(outcome.text_ids) for outcome in outcomes)),
        "codes": float(sum(outcome.codes for outcome in outcomes)),
        "audio_seconds": sum(outcome.audio_seconds for outcome in outcomes),
    }
    kinds = sorted({outcome.kind for outcome in outcomes})
    return SideFigures(
        requests=len(outcomes),
        wall=wall,
        metrics={name: summary([of(outcome) for outcome in outcomes]) for name, of in METRICS.items()},
        throughput={name: count / wall for name, count in made.items()},
        by_kind={kind: mean([o.jct for o in outcomes if o.kind == kind]) for kind in kinds},
    )


def ratios(mine: Sequence[OmniSlice], theirs: Sequence[OmniSlice]) -> dict[str, Ratio]:
    """Every metric of mine to that of theirs; both must have the same requests in the same rounds."""
    return {
        name: ratio(
            [
                [(of(a), of(b)) for a, b in zip(left.outcomes, right.outcomes, strict=True)]
                for left, right in zip(mine, theirs, strict=True)
            ]
        )
        for name, of in METRICS.items()
    }


def agreement(mine: Iterable[Outcome], theirs: Iterable[Outcome]) -> dict[str, float]:
    """Share of requests whose `reply` tokens and whose `codes` are equal on both sides.

    Not a correctness test (those are in tests/): with float32 and greedy decoding it should be 1, except for codes of
    static batches of Qwen3-Omni; a lower value is a sign of a problem.
    """
    pairs = list(zip(mine, theirs, strict=True))
    return {
        "reply": mean([float(a.text_ids == b.text_ids) for a, b in pairs]),
        "codes": mean([float(a.code_ids == b.code_ids) for a, b in pairs]),
    }


def check_agreement(agreed: Mapping[str, Mapping[str, float]]) -> None:
    """Raise `WrongWork` if most replies of a baseline differ from Segue's: the sides read different prompts, or have
    different weights. (Single replies may part where two tokens are equally likely but for rounding.)"""
    for name, shares in agreed.items():
        if shares["reply"] < LEAST_AGREEMENT:
            raise WrongWork(f"only {shares['reply']:.0%} of the replies of {name} equal Segue's")


def check_lengths(mine: Iterable[Outcome], theirs: Iterable[Outcome]) -> None:
    """Raise `WrongWork` if an answer's audio is longer on one side."""
    for a, b in zip(mine, theirs, strict=True):
        if abs(a.audio_seconds - b.audio_seconds) > SAME_LENGTH:
            raise WrongWork(
                f"request {a.index}: {a.audio_seconds:.3f} s of audio; the baseline has {b.audio_seconds:.3f} s"
            )


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
    outcomes = outcomes_of(slices)
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
