"""`segue bench steps`: compare decode steps and prefill of a language model with the device's ceilings, and with
`transformers` over the same weights (`docs/benchmarks.md`)."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from segue.bench.harness.device import OneLoaded, ceilings, name_of
from segue.bench.harness.hardware import machine
from segue.bench.harness.results import Level, measure
from segue.bench.steps.arguments import StepsBench
from segue.bench.steps.report import Decode, Prefill, Profile, StepsResult, StepsSettings
from segue.bench.steps.sides import (
    COMPILED,
    CONTINUOUS,
    PROFILED,
    SEGUE,
    STATIC,
    LibrarySide,
    Model,
    SegueSide,
    Side,
)
from segue.bench.steps.work import work_of
from segue.models.registry import read_config
from segue.parallel.wire import dtype_of

_WARM = 4
"""Tokens of the warm-up load before every level."""
_SHOWN = 12
"""Kernels that a profile keeps: those that took longest."""


@dataclass
class _Run:
    bench: StepsBench
    model: Model
    result: StepsResult
    sides: OneLoaded[Side]
    vocabulary: int


MAKERS: dict[str, tuple[str, Callable[[Model], Side]]] = {
    "segue": (SEGUE, SegueSide),
    "segue-compiled": (COMPILED, partial(SegueSide, compiled=True)),
    "static": (STATIC, partial(LibrarySide, continuous=False)),
    "continuous": (CONTINUOUS, partial(LibrarySide, continuous=True)),
}
"""By command-line name: the sides' names, and how they are loaded."""


async def run(bench: StepsBench, directory: Path) -> StepsResult:
    """Measure all levels on a model's directory; failures are recorded in the result."""
    model = Model(
        directory=directory,
        device=torch.device(bench.device),
        dtype=dtype_of(bench.dtype),
        batch=max((*bench.batches, *bench.profile)),
        longest=max(bench.prompt + max(bench.output, _WARM, 2 * PROFILED), *(tokens + 1 for tokens in bench.prefills)),
    )
    device = name_of(model.device)
    bench.say("the device's ceilings")
    result = StepsResult(
        machine=machine(),
        settings=StepsSettings(
            model=directory.name,
            device=device,
            dtype=bench.dtype,
            prompt=bench.prompt,
            output=bench.output,
            repeats=bench.repeats,
            seed=bench.seed,
        ),
        ceilings=ceilings(model.device, model.dtype),
        work=work_of(directory, model.dtype.itemsize),
    )
    sides: OneLoaded[Side] = OneLoaded(result, model.device, bench.seconds, bench.say)
    one = _Run(bench, model, result, sides, int(read_config(directory)["vocab_size"]))
    levels: list[Level] = []
    for way in bench.sides:
        levels += [partial(_level, one, way, batch, "decode", _decode) for batch in bench.batches]
        if way != "continuous":  # for one prompt its time is mostly its own start-up
            levels += [partial(_level, one, way, tokens, "prefill", _prefill) for tokens in bench.prefills]
        if way.startswith("segue"):
            levels += [partial(_level, one, way, batch, "profile", _profile) for batch in bench.profile]
    return await measure(result, levels, bench.keep)


async def _level(one: _Run, way: str, number: int, kind: str, measured: Callable[[_Run, str, Side, int], str]) -> None:
    name, make = MAKERS[way]
    what = f"{name}, {kind} {number}"
    one.sides.level(name, what, lambda: make(one.model), lambda side: measured(one, name, side, number))


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


def _profile(one: _Run, name: str, side: Side, batch: int) -> str:
    assert isinstance(side, SegueSide)
    side.run(_prompts(one, batch, one.bench.prompt, -1), _WARM)
    wall, events = side.profile(_prompts(one, batch, one.bench.prompt, 0))
    counted, seconds = Counter(event.name for event in events), defaultdict[str, float](float)
    for event in events:
        seconds[event.name] += event.seconds
    longest = sorted(seconds.items(), key=lambda entry: -entry[1])
    busy = sum(event.seconds for event in events)
    one.result.profiles.append(
        Profile(
            side=name,
            batch=batch,
            step=wall / PROFILED,
            busy=busy / PROFILED,
            kernels=len(events) / PROFILED,
            longest=[(what, counted[what] / PROFILED, taken / PROFILED) for what, taken in longest[:_SHOWN]],
        )
    )
    return f"{len(events) / PROFILED:.0f} kernels a step; the device works for {busy / wall:.0%} of the time"
