"""The result of `segue bench steps`, as its JSON file holds it."""

from __future__ import annotations

import msgspec

from segue.bench.ceilings import Ceilings
from segue.bench.one_loaded import DeviceResult
from segue.bench.steps_work import Work


class StepsSettings(msgspec.Struct, kw_only=True):
    """What was run."""

    model: str
    device: str
    dtype: str
    prompt: int
    """Tokens before the decode steps that are measured."""
    output: int
    """Tokens that each sequence gets."""
    repeats: int
    seed: int


class Decode(msgspec.Struct, kw_only=True):
    """So many sequences on one side."""

    side: str
    batch: int
    step: float
    """Seconds of a decode step, the median of the repeats."""
    tokens_per_second: float
    """Output tokens of the whole load, prefill included: the best repeat."""
    bound: float
    """Seconds that the step would take at the ceilings."""
    intensity: float
    """Operations per byte that must be read."""
    flops: float
    """Operations per second that were reached."""
    recorded: float | None = None
    """Share of the steps that ran from recordings, where the side has any."""


class Prefill(msgspec.Struct, kw_only=True):
    """One prompt on one side."""

    side: str
    tokens: int
    seconds: float
    """Until its first token: the best repeat."""
    of_ceiling: float


class StepsResult(DeviceResult, kw_only=True):
    benchmark: str = "steps"
    settings: StepsSettings
    ceilings: Ceilings
    work: Work
    decodes: list[Decode] = msgspec.field(default_factory=list)
    prefills: list[Prefill] = msgspec.field(default_factory=list)
