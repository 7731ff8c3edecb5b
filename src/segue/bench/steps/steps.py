"""`segue bench steps`: compare decode steps and prefill of a language model with the device's ceilings, and with
`transformers` over the same weights (`docs/benchmarks.md`). All sides are in this process."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from segue.bench.harness.device import OneLoaded, ceilings, name_of, settle
from segue.bench.harness.hardware import machine
from segue.bench.harness.library import Continuous, answers, generate, padded
from segue.bench.harness.results import Level, measure
from segue.bench.steps.arguments import StepsBench
from segue.bench.steps.results import Decode, Prefill, Profile, StepsResult, StepsSettings, work_of
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.speculation.contract import OpenTarget
from segue.engines.contract import StageRequest
from segue.kernels.graphs.compiled import compile_layers
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.registry import family_of, read_config
from segue.models.shared.checkpoint.pretrained import load_config, load_model
from segue.parallel.wire import dtype_of

PROFILED = 8
"""Decode steps under the profiler."""
_BEFORE = 4
"""Tokens of each sequence before them."""
_STAGE = "llm"
_TOKENS_PER_STEP = {"cpu": 512, "cuda": 8192}
_KV_BLOCK = 16
"""Tokens per KV block: Segue's default."""
_WARM = 4
"""Tokens of the warm-up load before every level."""
_SHOWN = 12
"""Kernels that a profile keeps: those that took longest."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The timing of one load, from start to end."""

    first: float
    """Seconds until every sequence had a token."""
    step: float
    """Seconds of a decode step after that; 0 if there was none."""
    wall: float
    recorded: float | None = None
    """Share of the steps that were replayed from captured graphs."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that all sides load, with random weights."""

    directory: Path
    device: torch.device
    dtype: torch.dtype
    batch: int
    """Maximum number of sequences."""
    longest: int
    """Maximum tokens of a sequence."""

    @property
    def context(self) -> AutoregressiveContext:
        return AutoregressiveContext(self.directory, _STAGE, self.device, self.dtype, "dummy", self.longest)


Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    """One way to run the model; constructing it loads it."""

    def run(self, prompts: Prompts, tokens: int) -> Timed:
        """Generate `tokens` tokens for every prompt, all at once. Raises `RuntimeError` if one gets another number."""


class SegueSide:
    """The engine of a stage, without a worker."""

    def __init__(self, model: Model, *, compiled: bool = False) -> None:
        """`compiled`: the decoder's layers, with `torch.compile`."""
        family = family_of(read_config(model.directory), model.directory)
        context = model.context
        context.fused = not compiled  # as a worker's stage has them
        stage_model = family.load_stages().STAGE_MODELS[_STAGE](context)
        if compiled:
            assert isinstance(stage_model, OpenTarget)
            compile_layers(stage_model.library_decoder, model.device.type)
        config = AutoregressiveConfig(
            num_blocks=model.batch * -(-model.longest // _KV_BLOCK),
            block_size=_KV_BLOCK,
            max_batch=model.batch,
            max_tokens_per_step=max(model.batch, _TOKENS_PER_STEP[model.device.type]),
            prefix_caching=False,
            enforce_eager=compiled and model.device.type == "cpu",  # as a worker does
        )
        self._device = model.device
        self._engine = AutoregressiveEngine(stage_model, config)
        with torch.inference_mode():
            self._engine.warm_up()
        self._served = 0

    def run(self, prompts: Prompts, tokens: int) -> Timed:
        engine = self._engine
        settle(self._device)
        steps, played = 0, engine.stats()["recorded_steps_total"]
        began = time.perf_counter()
        left = self._add(prompts, tokens)
        waiting = set(left)
        all_began = all_ended = 0.0
        together = 0
        while engine.has_work():
            waiting -= self._step(left)
            steps += 1
            if not waiting and not all_began:
                all_began, together = time.perf_counter(), min(left.values())
            if not all_ended and not min(left.values()):
                all_ended = time.perf_counter()
        settle(self._device)
        wall = time.perf_counter() - began
        if any(left.values()):
            raise RuntimeError(f"a sequence lacks tokens, or has too many: {left}")
        recorded = (engine.stats()["recorded_steps_total"] - played) / steps
        # between these two times every step had a token of every sequence
        return Timed(all_began - began, (all_ended - all_began) / together if together else 0.0, wall, recorded)

    def profile(self, prompts: Prompts) -> tuple[float, list[tuple[str, float]]]:
        """Profile `PROFILED` decode steps of all prompts. Returns seconds of the wall clock, and (name, seconds) of
        each kernel and copy of the device; on a CPU of the operators that were called from Python."""
        left = self._add(prompts, PROFILED + _BEFORE)
        waiting = set(left)
        while waiting or max(left.values()) > PROFILED:
            waiting -= self._step(left)
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        settle(self._device)
        with profile(activities=activities, acc_events=True) as profiler:
            began = time.perf_counter()
            while any(left.values()):
                self._step(left)
            settle(self._device)
            wall = time.perf_counter() - began
        return wall, [
            (one.name, one.time_range.elapsed_us() / 1e6)
            for one in profiler.events() or ()
            if (one.device_type != DeviceType.CPU if on_gpu else one.cpu_parent is None)
        ]

    def _add(self, prompts: Prompts, tokens: int) -> dict[str, int]:
        """Start requests. Returns, by name, how many tokens each of them lacks."""
        sampling = msgspec.structs.replace(FALLBACK, temperature=0.0, max_tokens=tokens, ignore_eos=True)
        edges = frozenset(("input",)), frozenset[str](), frozenset(("text",))
        left = {}
        for prompt in prompts:
            name = str(self._served)
            self._served += 1
            left[name] = tokens
            self._engine.add(StageRequest(name, _STAGE, Request(request_id=name), sampling, 0, *edges))
            self._engine.feed(name, "input", {"token_ids": torch.tensor(prompt)}, final=True)
        return left

    def _step(self, left: dict[str, int]) -> set[str]:
        """Run one step of the engine. Returns the requests that got tokens."""
        got = set()
        for output in self._engine.step():
            if output.error is not None:
                raise output.error
            left[output.request_id] -= len(output.token_ids)
            if output.token_ids:
                got.add(output.request_id)
        return got


class LibrarySide:
    """`generate` on one batch, or `generate_batch`: the library's own continuous batching."""

    def __init__(self, model: Model, *, continuous: bool) -> None:
        context = model.context
        self._model = load_model(context, load_config(context))
        self._model.generation_config.eos_token_id = None
        self._device = model.device
        blocks = model.batch * -(-model.longest // Continuous.BLOCK) + model.batch
        self._continuous = Continuous(self._model, blocks) if continuous else None

    def run(self, prompts: Prompts, tokens: int) -> Timed:
        settle(self._device)
        if self._continuous is None:
            return self._generate(prompts, tokens)
        return self._batched(self._continuous, prompts, tokens)

    def _generate(self, prompts: Prompts, tokens: int) -> Timed:
        ids, mask = padded(prompts, self._device)
        settle(self._device)
        began = time.monotonic()
        made, times = generate(self._model, ids, mask, tokens)
        settle(self._device)
        wall = time.monotonic() - began
        if made.shape[1] != ids.shape[1] + tokens:
            raise RuntimeError(f"generate gave {made.shape[1] - ids.shape[1]} tokens, not {tokens}")
        first = times[0] - began
        return Timed(first, (wall - first) / (tokens - 1) if tokens > 1 else 0.0, wall)

    def _batched(self, continuous: Continuous, prompts: Prompts, tokens: int) -> Timed:
        began = time.perf_counter()
        outputs = continuous.run(prompts, tokens, size=(len(prompts), tokens))
        settle(self._device)
        wall = time.perf_counter() - began
        found = answers(outputs, prompts)
        wrong = [len(ids) for ids, _ in found if len(ids) != tokens]
        if wrong:
            raise RuntimeError(f"generate_batch gave {wrong}, not {tokens} for each")
        first, last = max(times[0] for _, times in found), max(times[-1] for _, times in found)
        return Timed(first - began, (last - first) / (tokens - 1) if tokens > 1 else 0.0, wall)


SIDES: dict[str, tuple[str, Callable[[Model], Side]]] = {
    "segue": ("segue", SegueSide),
    "segue-compiled": ("segue, compiled layers", partial(SegueSide, compiled=True)),
    "static": ("transformers generate", partial(LibrarySide, continuous=False)),
    "continuous": ("transformers generate_batch", partial(LibrarySide, continuous=True)),
}
"""By command-line name: the sides' names, and how they are loaded."""


# --- levels


@dataclass
class _Run:
    bench: StepsBench
    model: Model
    result: StepsResult
    sides: OneLoaded[Side]
    vocabulary: int

    async def level(self, way: str, kind: str, number: int) -> None:
        name, make = SIDES[way]
        measured = {"decode": self.decode, "prefill": self.prefill, "profile": self.profile}[kind]
        what = f"{name}, {kind} {number}"
        self.sides.level(name, what, lambda: make(self.model), lambda side: measured(name, side, number))

    def prompts(self, count: int, tokens: int, salt: int) -> list[list[int]]:
        drawn = random.Random(f"{self.bench.seed} {count} {tokens} {salt}")
        return [[drawn.randrange(self.vocabulary) for _ in range(tokens)] for _ in range(count)]

    def decode(self, name: str, side: Side, batch: int) -> str:
        bench, result = self.bench, self.result
        side.run(self.prompts(batch, bench.prompt, -1), _WARM)
        timed = [side.run(self.prompts(batch, bench.prompt, number), bench.output) for number in range(bench.repeats)]
        step = median(one.step for one in timed)
        context = bench.prompt + bench.output / 2
        read, flops = result.work.decode_bytes(batch, context), result.work.decode_flops(batch, context)
        bound = max(read / result.ceilings.bytes_per_second, flops / result.ceilings.flops)
        speed = batch * bench.output / min(one.wall for one in timed)
        row = Decode(
            *(name, batch, step),
            tokens_per_second=speed,
            bound=bound,
            intensity=flops / read,
            flops=flops / step,
            recorded=timed[-1].recorded,
        )
        result.decodes.append(row)
        return f"{1e3 * step:.2f} ms, {step / bound:.2f} times the bound; {speed:.0f} tokens/s"

    def prefill(self, name: str, side: Side, tokens: int) -> str:
        side.run(self.prompts(1, tokens, -1), 1)
        timed = [side.run(self.prompts(1, tokens, number), 1) for number in range(self.bench.repeats)]
        seconds = min(one.first for one in timed)
        share = self.result.work.prefill_flops(tokens) / seconds / self.result.ceilings.flops
        self.result.prefills.append(Prefill(name, tokens, seconds, share))
        return f"{1e3 * seconds:.1f} ms, {share:.0%} of the ceiling"

    def profile(self, name: str, side: Side, batch: int) -> str:
        assert isinstance(side, SegueSide)
        side.run(self.prompts(batch, self.bench.prompt, -1), _WARM)
        wall, events = side.profile(self.prompts(batch, self.bench.prompt, 0))
        counted, seconds = Counter(event for event, _ in events), defaultdict[str, float](float)
        for event, took in events:
            seconds[event] += took
        longest = sorted(seconds.items(), key=lambda entry: -entry[1])[:_SHOWN]
        busy = sum(took for _, took in events)
        shown = [(event, counted[event] / PROFILED, took / PROFILED) for event, took in longest]
        row = Profile(name, batch, wall / PROFILED, busy / PROFILED, kernels=len(events) / PROFILED, longest=shown)
        self.result.profiles.append(row)
        return f"{row.kernels:.0f} kernels a step; the device works for {busy / wall:.0%} of the time"


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
        levels += [partial(one.level, way, "decode", batch) for batch in bench.batches]
        if way != "continuous":  # for one prompt its time is mostly its own start-up
            levels += [partial(one.level, way, "prefill", tokens) for tokens in bench.prefills]
        if way.startswith("segue"):
            levels += [partial(one.level, way, "profile", batch) for batch in bench.profile]
    return await measure(result, levels, bench.keep)
