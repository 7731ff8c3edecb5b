"""`segue bench steps`: decode steps and prefill of a language model against what the device can do, and against
`transformers` over the same weights (`docs/benchmarks.md`)."""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch

from segue.bench.ceilings import ceilings
from segue.bench.hardware import machine
from segue.bench.load_results import Level, measure
from segue.bench.steps_results import Decode, Prefill, StepsResult, StepsSettings
from segue.bench.steps_sides import CONTINUOUS, SEGUE, STATIC, LibrarySide, Model, SegueSide, Side
from segue.bench.steps_work import work_of
from segue.models.registry import read_config

_WARM = 4
"""Tokens of the load that is not counted, before every level."""


@dataclass(frozen=True, kw_only=True)
class StepsBench:
    """What to run."""

    model_dir: Path
    device: str
    dtype: str
    batches: Sequence[int]
    prompt: int
    output: int
    prefills: Sequence[int]
    """Tokens of prompts."""
    sides: Sequence[str]
    """Of `segue`, `static`, `continuous`."""
    repeats: int
    seconds: float
    """No level begins after so long."""
    seed: int
    keep: Callable[[StepsResult], None]
    """Called with the result so far after every level."""
    say: Callable[[str], None] = print

    @property
    def model(self) -> Model:
        longest = max(self.prompt + self.output, *(tokens + 1 for tokens in self.prefills), self.prompt + _WARM)
        return Model(
            directory=self.model_dir,
            device=torch.device(self.device),
            dtype=getattr(torch, self.dtype),
            batch=max(self.batches),
            longest=longest,
        )


@dataclass
class _Run:
    """A run under way. At most one side is loaded: the weights of two may be more than the device holds."""

    bench: StepsBench
    result: StepsResult
    began: float
    vocabulary: int
    loaded: dict[str, Side] = field(default_factory=dict)


MAKERS: dict[str, tuple[str, Callable[[Model], Side]]] = {
    "segue": (SEGUE, SegueSide),
    "static": (STATIC, partial(LibrarySide, continuous=False)),
    "continuous": (CONTINUOUS, partial(LibrarySide, continuous=True)),
}
"""By what the command line calls them: their names, and how they are loaded."""


async def run(bench: StepsBench) -> StepsResult:
    """Measure; what fails is in the result, and the rest is measured all the same."""
    began = time.monotonic()
    model = bench.model
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)
    bench.say("what the device can do")
    result = StepsResult(
        machine=machine(),
        settings=StepsSettings(
            model=bench.model_dir.name,
            device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
            dtype=bench.dtype,
            prompt=bench.prompt,
            output=bench.output,
            repeats=bench.repeats,
            seed=bench.seed,
        ),
        ceilings=ceilings(model.device, model.dtype),
        work=work_of(bench.model_dir, model.dtype.itemsize),
    )
    one = _Run(bench, result, began, int(read_config(bench.model_dir)["vocab_size"]))
    levels: list[Level] = []
    for way in bench.sides:
        levels += [partial(_level, one, way, batch, partial(_decode, batch=batch)) for batch in bench.batches]
        if way != "continuous":  # what it takes for one prompt is mostly its own start
            levels += [partial(_level, one, way, tokens, partial(_prefill, tokens=tokens)) for tokens in bench.prefills]
    await measure(result, levels, bench.keep)
    return result


async def _level(one: _Run, way: str, number: int, measured: Callable[[_Run, str, Side], str]) -> None:
    """One level; a failure is noted. After `seconds` there is nothing but the note."""
    name, make = MAKERS[way]
    what = f"{name}, {measured.func.__name__.strip('_')} {number}" if isinstance(measured, partial) else name
    if time.monotonic() - one.began > one.bench.seconds:
        one.result.failures[what] = f"not begun: {one.bench.seconds:g} s were over"
        return
    try:
        side = _side(one, name, make)
        one.bench.say(f"{what}: {measured(one, name, side)}")
    except Exception as error:  # whatever it is, it is a finding about this level, and kept as one
        one.result.failures[what] = traceback.format_exc()
        one.bench.say(f"{what}: {type(error).__name__}: {error}")
    device = one.bench.model.device
    if device.type == "cuda":
        one.result.peak_bytes[name] = torch.cuda.max_memory_allocated(device)


def _side(one: _Run, name: str, make: Callable[[Model], Side]) -> Side:
    """The side, loaded; any other is let go before."""
    if name not in one.loaded:
        one.loaded.clear()
        gc.collect()
        device = one.bench.model.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        began = time.monotonic()
        one.loaded[name] = make(one.bench.model)
        one.result.startup[name] = time.monotonic() - began
        one.bench.say(f"{name} is there after {one.result.startup[name]:.1f} s")
    return one.loaded[name]


def _prompts(one: _Run, count: int, tokens: int, salt: int) -> list[list[int]]:
    drawn = random.Random(f"{one.bench.seed} {count} {tokens} {salt}")
    return [[drawn.randrange(one.vocabulary) for _ in range(tokens)] for _ in range(count)]


def _decode(one: _Run, name: str, side: Side, batch: int) -> str:
    bench, result = one.bench, one.result
    side.run(_prompts(one, batch, bench.prompt, -1), _WARM)
    timed = [side.run(_prompts(one, batch, bench.prompt, number), bench.output) for number in range(bench.repeats)]
    step = median(one.step for one in timed)
    context = bench.prompt + bench.output / 2
    read, flops = result.work.decode_bytes(batch, context), result.work.decode_flops(batch, context)
    bound = max(read / result.ceilings.bytes_per_second, flops / result.ceilings.flops)
    speed = batch * bench.output / min(one.wall for one in timed)
    result.decodes.append(
        Decode(
            side=name,
            batch=batch,
            step=step,
            tokens_per_second=speed,
            bound=bound,
            intensity=flops / read,
            flops=flops / step,
            recorded=timed[-1].recorded,
        )
    )
    return f"{1e3 * step:.2f} ms, {step / bound:.2f} times the bound; {speed:.0f} tokens/s"


def _prefill(one: _Run, name: str, side: Side, tokens: int) -> str:
    side.run(_prompts(one, 1, tokens, -1), 1)
    timed = [side.run(_prompts(one, 1, tokens, number), 1) for number in range(one.bench.repeats)]
    seconds = min(one.first for one in timed)
    share = one.result.work.prefill_flops(tokens) / seconds / one.result.ceilings.flops
    one.result.prefills.append(Prefill(side=name, tokens=tokens, seconds=seconds, of_ceiling=share))
    return f"{1e3 * seconds:.1f} ms, {share:.0%} of the ceiling"
