"""`segue bench`: its sub-commands and their arguments."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from segue.bench.diffusion.arguments import add_diffusion
from segue.bench.gpu_check import add_gpu
from segue.bench.harness.arguments import add_out, check_installed, counts, progress, some_of
from segue.bench.steps.arguments import add_steps
from segue.bench.steps.attention import add_attention
from segue.bench.steps.denoise_arguments import add_denoise
from segue.bench.text.arguments import add_text
from segue.cli.parser import Parser, count

BASELINES = ("one", "static")
SIZES = ("tiny", "small")
SHAPES = ("7b",)
DTYPES = ("float32", "bfloat16", "float16")
NEEDS = ("matplotlib", "psutil")
_REPOSITORY = Path(__file__).parents[3]


def main(argv: list[str]) -> int:
    """Run `segue bench ARGV`; without arguments, `segue bench omni`. Returns the exit status."""
    if argv[:1] == ["hop"]:
        from segue.bench.hop import main as hop  # it has its own parser

        hop(argv[1:])
        return 0
    arguments = parser().parse_args(argv or ["omni"])
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def parser() -> Parser:
    top = Parser(prog="segue bench", description="measure Segue against the reference library")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("hop", help="bytes from worker to worker, against one memcpy", add_help=False)
    omni = commands.add_parser("omni", help="mixed multimodal requests, Segue against transformers' generate")
    model = omni.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="directory of a checkpoint")
    model.add_argument("--size", choices=SIZES, help="a frozen preset, made if absent (default: small)")
    model.add_argument("--shape", choices=SHAPES, help="a published shape without weights; implies --load-format dummy")
    omni.add_argument("--cache", type=Path, default=Path("out"), help="where presets are made (default: out)")
    omni.add_argument("--assets", type=Path, default=_REPOSITORY / "assets", help="photo, speech and video")
    omni.add_argument("--config", type=Path, help="deployment file of Segue")
    omni.add_argument("--threads", type=count, help="CPU threads of the baseline (default: as many as cores)")
    omni.add_argument("--concurrency", type=counts, default=[1, 8], help="clients, e.g. 1,8")
    omni.add_argument("--requests", type=count, default=16, help="per round and side (default: 16)")
    omni.add_argument("--rounds", type=count, default=3)
    omni.add_argument("--warmup", type=count, default=4, help="requests not counted, per side (default: 4)")
    omni.add_argument("--baseline", type=some_of(BASELINES), default=list(BASELINES), help="of one,static; or none")
    omni.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    omni.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    omni.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    omni.add_argument("--seed", type=int, default=0)
    add_out(omni)
    omni.set_defaults(run=_omni)
    add_text(commands)
    add_diffusion(commands)
    add_denoise(commands)
    add_steps(commands)
    add_attention(commands)
    add_gpu(commands)
    return top


def _omni(arguments: argparse.Namespace) -> int:
    check_installed(NEEDS)
    # slow imports (torch, matplotlib) that --help must not need
    from segue.bench.harness.checkpoint import make_preset, make_shape
    from segue.bench.harness.load_report import result_path, write_report
    from segue.bench.harness.result_file import write_result
    from segue.bench.omni.omni import OmniBench, run
    from segue.bench.omni.report import markdown, plot

    if arguments.model is not None:
        model = arguments.model
    elif arguments.shape is not None:
        model = make_shape(arguments.cache, arguments.shape)
    else:
        model = make_preset(arguments.cache, arguments.size or "small")
    path = result_path(arguments.out, "omni")
    bench = OmniBench(
        model_dir=model.resolve(),
        assets=arguments.assets,
        concurrency=_unique(arguments.concurrency),
        requests=arguments.requests,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        baselines=arguments.baseline,
        dtype=arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"),
        device=arguments.device,
        load_format="dummy" if arguments.shape is not None else arguments.load_format,
        seed=arguments.seed,
        config=arguments.config,
        threads=arguments.threads,
        keep=lambda so_far: write_result(so_far, path),
        say=progress,
    )
    write_report(asyncio.run(run(bench)), path, markdown, plot)
    return 0


def _unique(values: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(values))
