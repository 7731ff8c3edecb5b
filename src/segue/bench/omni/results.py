"""The result of `segue bench omni`, in the format of its JSON file, and its computation from outcomes and from what
Segue's workers report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from segue.bench.harness.load import outcomes_of
from segue.bench.harness.meters import SideUsage
from segue.bench.harness.results import Growing
from segue.bench.harness.scenarios import LoadSettings, wall_of
from segue.bench.harness.stages import StageFigures, busy_seconds, stage_figures
from segue.bench.harness.stats import HistogramFigures, Ratio, Snapshot, Summary, histogram_figures, mean, summary
from segue.bench.omni.outcome import OmniSlice, Outcome, WrongWork

METRICS: dict[str, Callable[[Outcome], float]] = {
    "jct": lambda one: one.jct,
    "ttft": lambda one: one.ttft,
    "ttfa": lambda one: one.ttfa,
    "rtf": lambda one: one.rtf,
}
"""Compared figures of a request."""
LEAST_AGREEMENT = 0.5
SAME_LENGTH = 0.001
"""Seconds by which the audio of two sides may differ."""
UNITS = {
    "thinker": ("tokens", "reply_tokens"),
    "talker": ("codes", "codes"),
    "vocoder": ("audio seconds", "audio_seconds"),
}
"""Stage → what it makes, and its name in `SideFigures.throughput`; other stages answer requests."""


class Settings(LoadSettings, kw_only=True):
    """Settings of the run."""

    workload: str = "mixed"
    device: str
    load_format: str
    requests: int
    """Requests per round and side."""
    warmup: int
    sides: list[str]
    threads: dict[str, dict[str, int]]
    """Side → process → CPU threads."""
    silence: float


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
    outcomes, wall = outcomes_of(slices), wall_of(slices)
    kinds = sorted({outcome.kind for outcome in outcomes})
    return SideFigures(
        requests=len(outcomes),
        wall=wall,
        metrics={name: summary([metric(one) for one in outcomes]) for name, metric in METRICS.items()},
        throughput={name: count / wall for name, count in _made(slices).items()},
        by_kind={kind: mean([o.jct for o in outcomes if o.kind == kind]) for kind in kinds},
    )


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
            lengths = f"{a.audio_seconds:.3f} s of audio; the baseline has {b.audio_seconds:.3f} s"
            raise WrongWork(f"request {a.index}: {lengths}")


def segue_stages(between: Snapshot, slices: Sequence[OmniSlice]) -> dict[str, StageFigures]:
    """Stage figures from the workers' step times."""
    made = _made(slices)
    stages: dict[str, StageFigures] = {}
    for (stage, name), steps in between.items():
        if name == "step_seconds":
            sizes = between.get((stage, "batch_size"))
            batch = None if sizes is None else histogram_figures(sizes)
            stages[stage] = _stage(stage, made, steps.sum, wall_of(slices), histogram_figures(steps), batch)
    return stages


def baseline_stages(slices: Sequence[OmniSlice]) -> dict[str, StageFigures]:
    """Stage figures from the times at which each batch left a stage."""
    made, busy = _made(slices), busy_seconds((one.sent, one.spans) for one in outcomes_of(slices))
    return {stage: _stage(stage, made, seconds, wall_of(slices)) for stage, seconds in busy.items()}


def _stage(
    stage: str, made: dict[str, float], busy: float, wall: float, *histograms: HistogramFigures | None
) -> StageFigures:
    unit, name = UNITS.get(stage, ("requests", "requests"))
    return stage_figures(unit, made[name], busy, wall, *histograms)


def _made(slices: Sequence[OmniSlice]) -> dict[str, float]:
    outcomes = outcomes_of(slices)
    return {
        "requests": float(len(outcomes)),
        "reply_tokens": float(sum(len(outcome.text_ids) for outcome in outcomes)),
        "codes": float(sum(outcome.codes for outcome in outcomes)),
        "audio_seconds": sum(outcome.audio_seconds for outcome in outcomes),
    }
