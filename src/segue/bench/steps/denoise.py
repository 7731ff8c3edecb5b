"""`segue bench denoise`: compare a denoiser in a published shape with the device's ceilings, and with the pipeline of
`diffusers`, eager and compiled (`docs/benchmarks.md`). All sides are in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from segue.bench.harness.device import Ceilings, DeviceResult, OneLoaded, ceilings, device_page, name_of, settle
from segue.bench.harness.hardware import machine
from segue.bench.harness.report import Columns, table_of, versions
from segue.bench.harness.results import Level, measure
from segue.bench.steps.arguments import DenoiseBench
from segue.engines.contract import StageRequest
from segue.engines.diffusion.contract import DenoiserContext, Row
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine
from segue.messages.diffusion import DiffusionParams, diffusion_from
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.registry import family_of, read_config
from segue.models.shared.diffusion.library import LIBRARIES
from segue.models.shared.diffusion.loading import component_class, load_component
from segue.models.shared.diffusion.shapes import SHAPES, Shape, write_shape
from segue.parallel.wire import dtype_of

EXACT = "segue"
GUIDANCE = 4.0
_BRANCHES = 2
"""Rows of a step: with the prompt, and with the negative prompt."""
_WARM = 3
"""Steps of the warm-up request: graphs are captured at the third call."""
_STAGE, _TEXTS = "denoiser", "text_encoder"
_PROMPT, _NEGATIVE, _PADDED = 64, 24, 512
"""Tokens of texts; the last if a network requires texts of one length."""


@dataclass(frozen=True, kw_only=True)
class Painted:
    """The workload of all sides, with random weights."""

    directory: Path
    shape: Shape
    request: dict[str, Any]
    """Height, width, and the like."""
    device: torch.device
    dtype: torch.dtype
    steps: int
    together: int
    """Maximum number of simultaneous requests."""
    deployed: dict[str, Any] = field(default_factory=dict)
    """Fields of `DenoiserContext`, for Segue."""

    @property
    def context(self) -> DenoiserContext:
        return DenoiserContext(self.directory, _STAGE, self.device, self.dtype, load_format="dummy", **self.deployed)

    @property
    def stage_model(self) -> Any:
        """Segue's denoiser, loaded anew."""
        family = family_of(read_config(self.directory), self.directory)
        return family.load_stages().STAGE_MODELS[_STAGE](self.context)

    def params(self, steps: int, **more: Any) -> DiffusionParams:
        given = {**self.request, "num_inference_steps": steps, "max_sequence_length": _PADDED, **more}
        given[self.shape.guidance] = GUIDANCE
        if "num_frames" in self.request:
            given["fps"] = 24.0
        return diffusion_from(given)

    def texts(self, tokens: int, seed: int) -> torch.Tensor:
        """[tokens, width]: stands for a text encoder's output."""
        drawn = torch.randn(tokens, self.shape.text_width, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.dtype)


# --- sides


class Side(Protocol):
    """One way to denoise; constructing it loads it."""

    def run(self, count: int, steps: int) -> tuple[float, list[torch.Tensor]]:
        """Run `count` simultaneous requests: seconds until all finish, and their latents."""


class SegueSide:
    """The engine of the denoiser, without a worker."""

    def __init__(self, painted: Painted, *, deployed: dict[str, Any] | None = None, **changes: Any) -> None:
        """`deployed`: as in `Painted`. `changes`: parameters of every request."""
        self._painted = replace(painted, deployed=deployed or {})
        self._changes = changes
        self._engine = DiffusionEngine(self._painted.stage_model, DiffusionConfig(max_batch=2 * painted.together))
        with torch.inference_mode():
            self._engine.warm_up()
        self._served = 0

    def run(self, count: int, steps: int) -> tuple[float, list[torch.Tensor]]:
        engine, painted = self._engine, self._painted
        made: dict[str, torch.Tensor] = {}
        names = []
        settle(painted.device)
        began = time.perf_counter()
        with torch.inference_mode():
            for seed in range(count):
                names.append(str(self._served))
                self._served += 1
                engine.add(asked(names[-1], seed))
                for upstream, payload in inputs(painted, painted.params(steps, **self._changes), seed).items():
                    engine.feed(names[-1], upstream, payload, final=True)
            while engine.has_work():
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    if output.payload is not None:
                        made[output.request_id] = output.payload["latents"]
        settle(painted.device)
        return time.perf_counter() - began, [made[name] for name in names]


class LibrarySide:
    """The library's pipeline, one request at a time, without encoders and decoder."""

    def __init__(self, painted: Painted, *, compiled: bool) -> None:
        self._painted = painted
        context = painted.context
        scheduler = component_class(painted.directory, "scheduler")
        network = load_component(context, "transformer")
        if compiled:
            network.compile_repeated_blocks()
        parts = {"text_encoder": None, "tokenizer": None, "transformer": network}
        parts["vae"] = load_component(context, "vae")
        parts["scheduler"] = scheduler.from_pretrained(painted.directory, subfolder="scheduler")
        kind = getattr(LIBRARIES["diffusers"], painted.shape.pipeline)
        self._pipeline = kind(**parts, **painted.shape.settings)
        self._pipeline.set_progress_bar_config(disable=True)

    def run(self, count: int, steps: int) -> tuple[float, list[torch.Tensor]]:
        settle(self._painted.device)
        began = time.perf_counter()
        with torch.inference_mode():
            made = [self._one(steps, seed) for seed in range(count)]
        settle(self._painted.device)
        return time.perf_counter() - began, made

    def _one(self, steps: int, seed: int) -> torch.Tensor:
        painted = self._painted
        given: dict[str, Any] = {painted.shape.guidance: GUIDANCE, "num_inference_steps": steps}
        for name, tokens in (("prompt", _PROMPT), ("negative_prompt", _NEGATIVE)):
            texts = painted.texts(tokens, seed)[None]
            if painted.shape.pipeline.startswith("Wan"):
                texts = torch.nn.functional.pad(texts, (0, 0, 0, _PADDED - tokens))
            else:
                given[f"{name}_embeds_mask"] = torch.ones(1, tokens, dtype=torch.long, device=painted.device)
            given[f"{name}_embeds"] = texts
        noise = torch.Generator().manual_seed(seed)
        made: torch.Tensor = self._pipeline(**painted.request, **given, generator=noise, output_type="latent")[0]
        return made


SIDES: dict[str, tuple[str, Callable[[Painted], Side]]] = {
    "segue": (EXACT, SegueSide),
    "segue-compiled": ("segue, compiled", partial(SegueSide, deployed={"compile": True})),
    "eager": ("diffusers", partial(LibrarySide, compiled=False)),
    "compiled": ("diffusers, compiled", partial(LibrarySide, compiled=True)),
    "fp8": ("segue, fp8", partial(SegueSide, deployed={"quantization": "fp8"})),
    "first-block": ("segue, first_block", partial(SegueSide, step_cache="first_block")),
    "taylorseer": ("segue, taylorseer", partial(SegueSide, step_cache="taylorseer")),
}
"""By command-line name: the sides' names, and how they are loaded."""


def asked(name: str, seed: int) -> StageRequest:
    """A request for a denoiser, which receives settings and texts."""
    upstreams, downstreams = frozenset(("input", _TEXTS)), frozenset(("decoder",))
    return StageRequest(name, _STAGE, Request(request_id=name), FALLBACK, seed, upstreams, downstreams, frozenset())


def inputs(painted: Painted, params: DiffusionParams, seed: int) -> dict[str, dict[str, Any]]:
    """Input payloads by upstream stage."""
    texts = [{"embeds": painted.texts(tokens, seed)} for tokens in (_PROMPT, _NEGATIVE)]
    return {"input": {"settings": msgspec.to_builtins(params)}, _TEXTS: {"texts": texts}}


def row_flops(painted: Painted) -> float:
    """Operations of one call of the network for one row: matmuls and attention, counted by torch on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    meta = replace(painted, device=torch.device("meta"), deployed={})
    stage_model = meta.stage_model
    state = stage_model.begin(asked("counted", 0))
    samples: Sequence[Any] = []
    for upstream, payload in inputs(meta, meta.params(2), 0).items():
        samples = stage_model.feed(state, upstream, payload, final=True) or samples
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        stage_model.predict([Row(samples[0], 0)])
    return float(counter.get_total_flops())


# --- levels


class Denoised(msgspec.Struct, kw_only=True):
    """The figures of one level: a number of requests on one side."""

    side: str
    clients: int
    wall: float
    """Seconds until all requests finished."""
    steps_per_second: float
    """Denoising steps of all requests."""
    flops: float
    """Operations per second, counting those of the exact network."""
    of_ceiling: float
    error: float | None = None
    """Root mean square difference of the latents from Segue's exact ones, relative to these."""


class DenoiseResult(DeviceResult, kw_only=True):
    benchmark: str = "denoise"
    model: str
    device: str
    dtype: str
    request: dict[str, int]
    steps: int
    row_flops: float
    """Operations of one call for one row."""
    ceilings: Ceilings
    denoised: list[Denoised] = msgspec.field(default_factory=list)


@dataclass
class _Run:
    painted: Painted
    result: DenoiseResult
    one: OneLoaded[Side]
    exact: list[torch.Tensor] = field(default_factory=list)
    """Segue's exact latents, on the CPU."""

    async def level(self, way: str, clients: int) -> None:
        name, make = SIDES[way]

        def made() -> Side:
            side = make(self.painted)
            side.run(1, _WARM)
            return side

        self.one.level(name, f"{name}, {clients} at once", made, lambda side: self._measured(name, side, clients))

    def _measured(self, name: str, side: Side, clients: int) -> str:
        steps, result = self.painted.steps, self.result
        if clients > 1 and isinstance(side, SegueSide):
            side.run(clients, 1)  # warm up calls with this number of rows
        wall, latents = side.run(clients, steps)
        speed = clients * steps / wall
        flops = speed * _BRANCHES * result.row_flops
        share = flops / result.ceilings.flops
        row = Denoised(side=name, clients=clients, wall=wall, steps_per_second=speed, flops=flops, of_ceiling=share)
        made = [one.float().cpu() for one in latents]
        if name == EXACT and len(made) > len(self.exact):
            self.exact = made
        if isinstance(side, SegueSide) and name != EXACT and len(self.exact) >= clients:
            pairs = zip(made, self.exact, strict=False)
            row.error = max(float((mine - exact).norm() / exact.norm()) for mine, exact in pairs)
        result.denoised.append(row)
        return f"{speed:.2f} steps/s, {flops / 1e12:.1f} TFLOP/s, {share:.0%} of the ceiling"


async def run(bench: DenoiseBench) -> DenoiseResult:
    """Measure all levels; failures are recorded in the result."""
    shape = SHAPES[bench.shape]
    given = {"height": bench.height, "width": bench.width, "num_frames": bench.frames}
    painted = Painted(
        directory=write_shape(bench.cache, bench.shape).resolve(),
        shape=shape,
        request={**shape.request, **{name: value for name, value in given.items() if value is not None}},
        device=torch.device(bench.device),
        dtype=dtype_of(bench.dtype),
        steps=bench.steps,
        together=max(bench.clients),
    )
    device = name_of(painted.device)
    bench.say("the device's ceilings")
    result = DenoiseResult(
        machine=machine(),
        model=painted.directory.name,
        device=device,
        dtype=bench.dtype,
        request=painted.request,
        steps=painted.steps,
        row_flops=row_flops(painted),
        ceilings=ceilings(painted.device, painted.dtype),
    )
    taken = _Run(painted, result, OneLoaded(result, painted.device, bench.seconds, bench.say))
    levels: list[Level] = [partial(taken.level, way, clients) for way in bench.sides for clients in bench.clients]
    return await measure(result, levels, bench.keep)


def markdown(result: DenoiseResult) -> str:
    """Title, ceiling, one row per level, and failures."""
    size = ", ".join(f"{name} {value}" for name, value in result.request.items())
    columns: Columns[Denoised] = {
        "side": lambda one: one.side,
        "clients": lambda one: str(one.clients),
        "all (s)": lambda one: f"{one.wall:.1f}",
        "steps/s": lambda one: f"{one.steps_per_second:.2f}",
        "TFLOP/s": lambda one: f"{one.flops / 1e12:.1f}",
        "of the ceiling": lambda one: f"{one.of_ceiling:.0%}",
        "error": lambda one: "" if one.error is None else f"{one.error:.1e}",
    }
    return device_page(
        result,
        f"{result.model}, {result.dtype}, {result.device}",
        f"{size}; {result.steps} steps; a call takes {result.row_flops / 1e12:.1f} TFLOP per row, a matmul reaches "
        f"{result.ceilings.flops / 1e12:.1f} TFLOP/s; random weights; {versions(result.machine.packages)}.",
        table_of(result.denoised, columns),
    )
