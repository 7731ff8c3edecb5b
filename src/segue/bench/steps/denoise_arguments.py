"""The arguments of `segue bench denoise`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from segue.bench.harness.arguments import add_device, add_out, counts, progress, some_of
from segue.cli.parser import Parser, count

SHAPES = ("qwen-image", "wan2.2-ti2v-5b", "tiny-image", "tiny-video")
SIDES = ("segue", "segue-compiled", "eager", "compiled", "fp8", "first-block", "taylorseer")


def add_denoise(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the sub-command and its arguments."""
    denoise = commands.add_parser("denoise", help="a denoiser against the device's ceiling and diffusers' pipelines")
    denoise.add_argument("--shape", choices=SHAPES, default="qwen-image", help="(default: qwen-image)")
    denoise.add_argument("--cache", type=Path, default=Path("out"), help="where shapes are written (default: out)")
    add_device(denoise)
    denoise.add_argument("--height", type=count, help="pixels (default: the shape's own)")
    denoise.add_argument("--width", type=count, help="pixels (default: the shape's own)")
    denoise.add_argument("--frames", type=count, help="of a video (default: the shape's own)")
    denoise.add_argument("--steps", type=count, default=50, help="of every request (default: 50)")
    denoise.add_argument("--clients", type=counts, default=[1, 4], help="requests at once (default: 1,4)")
    denoise.add_argument("--sides", type=some_of(SIDES), default=list(SIDES), help=f"of {','.join(SIDES)}")
    denoise.add_argument("--seconds", type=count, default=480, help="nothing new is begun after so long (default: 480)")
    add_out(denoise)
    denoise.set_defaults(run=_denoise)


def _denoise(arguments: argparse.Namespace) -> int:
    # slow imports (torch, diffusers) that --help must not need
    import torch

    from segue.bench.harness.load_report import result_path, write_report
    from segue.bench.harness.result_file import write_result
    from segue.bench.steps.denoise import DenoiseBench, markdown, run
    from segue.bench.steps.denoise_sides import Painted
    from segue.models.shared.diffusion.shapes import SHAPES as PUBLISHED
    from segue.models.shared.diffusion.shapes import write_shape
    from segue.parallel.orders import dtype_of

    shape = PUBLISHED[arguments.shape]
    directory = write_shape(arguments.cache, arguments.shape).resolve()
    said = {"height": arguments.height, "width": arguments.width, "num_frames": arguments.frames}
    path = result_path(arguments.out, f"denoise-{arguments.shape}")
    clients = list(dict.fromkeys(arguments.clients))
    bench = DenoiseBench(
        painted=Painted(
            directory=directory,
            shape=shape,
            request={**shape.request, **{name: value for name, value in said.items() if value is not None}},
            device=torch.device(arguments.device),
            dtype=dtype_of(arguments.dtype),
            steps=arguments.steps,
            together=max(clients),
        ),
        sides=arguments.sides,
        clients=clients,
        seconds=arguments.seconds,
        keep=lambda so_far: write_result(so_far, path),
        say=progress,
    )
    result = asyncio.run(run(bench))
    write_report(result, path, markdown)
    return 1 if result.failures else 0
