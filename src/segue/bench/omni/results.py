"""The result of one benchmark, in the format of its JSON file."""

from __future__ import annotations

import msgspec

from segue.bench.harness.load_results import GrowingResult
from segue.bench.harness.meters import SideUsage
from segue.bench.harness.stats import HistogramFigures, Ratio, SideFigures
from segue.bench.omni.outcome import Outcome


class Settings(msgspec.Struct, kw_only=True):
    """Settings of the run."""

    model: str
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


class Result(GrowingResult, kw_only=True):
    benchmark: str = "omni"
    settings: Settings
    levels: list[LevelResult]
    gpu_peak_bytes: dict[str, int] = msgspec.field(default_factory=dict)
