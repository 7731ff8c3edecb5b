"""The sides of `segue bench steps`, each in this process: Segue's engine, and `transformers` over the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from segue.bench.harness.device import settle
from segue.bench.harness.library import Continuous, answers, generate, padded
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

SEGUE, STATIC, CONTINUOUS = "segue", "transformers generate", "transformers generate_batch"
COMPILED = "segue, compiled layers"
PROFILED = 8
"""Decode steps under the profiler."""
_BEFORE = 4
"""Tokens of each sequence before them."""
_STAGE = "llm"
_TOKENS_PER_STEP = {"cpu": 512, "cuda": 8192}
_KV_BLOCK = 16
"""Tokens per KV block: Segue's default."""


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


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or copy of the device, or on a CPU an operator."""

    name: str
    seconds: float


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
        return AutoregressiveContext(
            model_dir=self.directory,
            stage=_STAGE,
            device=self.device,
            dtype=self.dtype,
            load_format="dummy",
            max_model_len=self.longest,
        )


class Side(Protocol):
    """One way to run the model; constructing it loads it."""

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timed:
        """Generate `tokens` tokens for every prompt, all at once. Raises `RuntimeError` if one gets another number."""


class SegueSide:
    """The engine of a stage, without a worker."""

    def __init__(self, model: Model, *, compiled: bool = False, **options: Any) -> None:
        """`compiled`: the decoder's layers, with `torch.compile`. `options`: fields of `AutoregressiveConfig`."""
        family = family_of(read_config(model.directory), model.directory)
        context = model.context
        context.fused = not compiled  # as a worker's stage has them
        stage_model = family.load_stages().STAGE_MODELS[_STAGE](context)
        if compiled:
            assert isinstance(stage_model, OpenTarget)
            compile_layers(stage_model.library_decoder, model.device.type)
        given = {
            "num_blocks": model.batch * -(-model.longest // _KV_BLOCK),
            "block_size": _KV_BLOCK,
            "max_batch": model.batch,
            "max_tokens_per_step": max(model.batch, _TOKENS_PER_STEP[model.device.type]),
            "prefix_caching": False,
            "enforce_eager": compiled and model.device.type == "cpu",  # as a worker does
        }
        self._device = model.device
        self._engine = AutoregressiveEngine(stage_model, AutoregressiveConfig(**{**given, **options}))
        with torch.inference_mode():
            self._engine.warm_up()
        self._served = 0

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timed:
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

    def profile(self, prompts: Sequence[Sequence[int]]) -> tuple[float, list[Event]]:
        """Profile `PROFILED` decode steps of all prompts. Returns (seconds of the wall clock, what the device ran; on a
        CPU the operators that were called from Python)."""
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
        found = [
            Event(one.name, one.time_range.elapsed_us() / 1e6)
            for one in profiler.events() or ()
            if (one.device_type != DeviceType.CPU if on_gpu else one.cpu_parent is None)
        ]
        return wall, found

    def _add(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, int]:
        """Start requests. Returns, by name, how many tokens each of them lacks."""
        engine = self._engine
        sampling = msgspec.structs.replace(FALLBACK, temperature=0.0, max_tokens=tokens, ignore_eos=True)
        left = {}
        for prompt in prompts:
            name = str(self._served)
            self._served += 1
            left[name] = tokens
            request = Request(request_id=name)
            engine.add(
                StageRequest(
                    name, _STAGE, request, sampling, 0, frozenset(("input",)), frozenset(), frozenset(("text",))
                )
            )
            engine.feed(name, "input", {"token_ids": torch.tensor(prompt)}, final=True)
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

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timed:
        settle(self._device)
        if self._continuous is None:
            return self._generate(prompts, tokens)
        return self._batched(self._continuous, prompts, tokens)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timed:
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

    def _batched(self, continuous: Continuous, prompts: Sequence[Sequence[int]], tokens: int) -> Timed:
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
