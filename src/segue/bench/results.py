"""The result of one benchmark, as its JSON file holds it."""

from __future__ import annotations

import msgspec

from segue.bench.load_results import GrowingResult
from segue.bench.meters import SideUsage
from segue.bench.outcome import Outcome
from segue.bench.stats import HistogramFigures, Ratio, SideFigures


class Settings(msgspec.Struct, kw_only=True):
    """What was run."""

    model: str
    device: str
    dtype: str
    load_format: str
    seed: int
    requests: int
    """Per round and side."""
    rounds: int
    warmup: int
    sides: list[str]
    threads: dict[str, dict[str, int]]
    """Side → process → CPU threads."""
    silence: float


class StageFigures(msgspec.Struct, kw_only=True):
    """One stage of one side, all rounds together."""

    unit: str
    made: float
    """Units: tokens, codes, seconds of audio."""
    busy: float
    """Seconds in which the stage computed."""
    per_busy_second: float
    utilisation: float
    """Share of the side's wall time."""
    steps: HistogramFigures | None = None
    batch: HistogramFigures | None = None


class LevelResult(msgspec.Struct, kw_only=True):
    """All sides at one concurrency."""

    concurrency: int
    sides: dict[str, SideFigures]
    ratios: dict[str, dict[str, Ratio]]
    """Baseline → metric → Segue over it."""
    agreement: dict[str, dict[str, float]]
    """Baseline → share of equal replies and codes."""
    stages: dict[str, dict[str, StageFigures]]
    """Side → stage."""
    hops: dict[str, HistogramFigures]
    """Segue's edges: seconds from a chunk's departure to its arrival."""
    usage: dict[str, SideUsage]
    batches: dict[str, float]
    """Baseline → mean size of the batch a request was in."""
    outcomes: dict[str, list[Outcome]]
    """Side → every request; token ids are left out."""


class Result(GrowingResult, kw_only=True):
    benchmark: str = "omni"
    settings: Settings
    levels: list[LevelResult]
    gpu_peak_bytes: dict[str, int] = msgspec.field(default_factory=dict)
