"""`segue bench denoise`: compare a denoiser in a published shape with the device's ceilings, and with the pipeline of
`diffusers`, eager and compiled (`docs/benchmarks.md`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import msgspec
import torch

from segue.bench.harness.device import (
    Ceilings,
    DeviceResult,
    OneLoaded,
    ceilings,
    device_page,
    name_of,
)
from segue.bench.harness.hardware import machine
from segue.bench.harness.report import Columns, table_of, versions
from segue.bench.harness.results import Level, measure
from segue.bench.steps.arguments import DenoiseBench
from segue.bench.steps.denoise_sides import LibrarySide, Painted, SegueSide, Side, row_flops
from segue.models.shared.diffusion.shapes import SHAPES, write_shape
from segue.parallel.wire import dtype_of

EXACT = "segue"
_BRANCHES = 2
"""Rows of a step: with the prompt, and with the negative prompt."""
_WARM = 3
"""Steps of the warm-up request: graphs are captured at the third call."""


def _segue(painted: Painted, deployed: Mapping[str, object], **changes: object) -> Side:
    return SegueSide(replace(painted, deployed=dict(deployed)), **changes)


SIDES: dict[str, tuple[str, Callable[[Painted], Side]]] = {
    "segue": (EXACT, partial(_segue, deployed={})),
    "segue-compiled": ("segue, compiled", partial(_segue, deployed={"compile": True})),
    "eager": ("diffusers", partial(LibrarySide, compiled=False)),
    "compiled": ("diffusers, compiled", partial(LibrarySide, compiled=True)),
    "fp8": ("segue, fp8", partial(_segue, deployed={"quantization": "fp8"})),
    "first-block": ("segue, first_block", partial(_segue, deployed={}, step_cache="first_block")),
    "taylorseer": ("segue, taylorseer", partial(_segue, deployed={}, step_cache="taylorseer")),
}
"""By command-line name: the sides' names, and how they are loaded."""


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


class _Run:
    def __init__(self, painted: Painted, result: DenoiseResult, one: OneLoaded[Side]) -> None:
        self.painted = painted
        self.result = result
        self.one = one
        self.exact: list[torch.Tensor] = []
        """Segue's exact latents, on the CPU."""

    async def level(self, way: str, clients: int) -> None:
        name, make = SIDES[way]

        def made() -> Side:
            side = make(self.painted)
            side.run(1, _WARM)
            return side

        self.one.level(name, f"{name}, {clients} at once", made, lambda side: self._measured(name, side, clients))

    def _measured(self, name: str, side: Side, clients: int) -> str:
        painted, result = self.painted, self.result
        if clients > 1 and isinstance(side, SegueSide):
            side.run(clients, 1)  # warm up calls with this number of rows
        wall, latents = side.run(clients, painted.steps)
        speed = clients * painted.steps / wall
        flops = speed * _BRANCHES * result.row_flops
        made = [one.float().cpu() for one in latents]
        if name == EXACT and len(made) > len(self.exact):
            self.exact = made
        error = None
        if isinstance(side, SegueSide) and name != EXACT and len(self.exact) >= clients:
            pairs = zip(made, self.exact, strict=False)
            error = max(float((mine - exact).norm() / exact.norm()) for mine, exact in pairs)
        share = flops / result.ceilings.flops
        result.denoised.append(
            Denoised(
                side=name,
                clients=clients,
                wall=wall,
                steps_per_second=speed,
                flops=flops,
                of_ceiling=share,
                error=error,
            )
        )
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
