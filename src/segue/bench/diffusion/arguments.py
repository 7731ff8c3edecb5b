"""The arguments of `segue bench diffusion`."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from segue.bench.harness.arguments import add_out, check_installed, counts, progress
from segue.cli.parser import Parser, count
from segue.messages.diffusion import diffusion_from
from segue.messages.errors import ConfigError, InvalidRequest

CACHES = (("first_block", 0.1), ("first_block", 1.0), ("teacache", None), ("taylorseer", None))
"""Step caches whose losses are measured by default."""
NEEDS = ("matplotlib", "psutil")


def add_diffusion(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the sub-command and its arguments."""
    images = commands.add_parser("diffusion", help="images, Segue against diffusers' pipelines")
    model = images.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="directory of a pipeline that makes images")
    model.add_argument("--preset", default="qwen-image", help="a preset of segue tiny, made if absent (qwen-image)")
    images.add_argument("--preset-size", default="small", help="of the preset (default: small)")
    images.add_argument(
        "--kept",
        choices=["float32", "bfloat16"],
        default="float32",
        help="type of a preset's weights on the disk; bfloat16 is what models are published in",
    )
    images.add_argument("--cache", type=Path, default=Path("out"), help="where presets are made (default: out)")
    images.add_argument("--sizes", type=counts, default=[256, 128], help="height and width in pixels (256,128)")
    images.add_argument("--concurrency", type=counts, default=[1, 4, 8], help="clients (default: 1,4,8)")
    images.add_argument("--requests", type=count, default=16, help="per round with several clients (default: 16)")
    images.add_argument("--rounds", type=count, default=3)
    images.add_argument("--load", type=float, default=0.8, help="arrivals, of diffusers' capacity; 0: none (0.8)")
    images.add_argument("--arrivals", type=count, default=30, help="per round (default: 30)")
    images.add_argument("--guidance", type=float, default=4.0, help="of classifier-free guidance; 1: none (4)")
    images.add_argument(
        "--most-difference",
        type=count,
        help="levels of 255 by which images of the sides may differ (preset qwen-image: 2; others: not checked)",
    )
    images.add_argument(
        "--step-cache",
        type=step_cache,
        action="append",
        default=[],
        metavar="NAME[:THRESHOLD]",
        help="Segue with this step cache beside Segue without; may be given several times",
    )
    images.add_argument(
        "--losses",
        action="store_true",
        help="instead: Segue with quantised weights and step caches against its own exact images, first of --sizes",
    )
    images.add_argument(
        "--few-steps", type=count, default=8, help="with --losses: steps of the side with an adapter for few (8)"
    )
    images.add_argument(
        "--few-steps-lora", type=Path, metavar="PATH", help="that adapter (default: one that changes nothing)"
    )
    cores = len(os.sched_getaffinity(0))
    images.add_argument("--threads", type=count, default=cores, help="CPU threads of diffusers (default: all cores)")
    images.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    images.add_argument("--config", type=Path, help="deployment file of Segue")
    images.add_argument("--seed", type=int, default=0)
    add_out(images)
    images.set_defaults(run=_diffusion)


def step_cache(text: str) -> tuple[str, float | None]:
    """`first_block:0.1` → name and threshold. Raises `ArgumentTypeError`."""
    name, _, threshold = text.partition(":")
    try:
        diffusion_from({"step_cache": name, "step_cache_threshold": float(threshold) if threshold else None})
    except (ValueError, InvalidRequest) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, float(threshold) if threshold else None


def _diffusion(arguments: argparse.Namespace) -> int:
    check_installed(NEEDS)
    if arguments.losses:
        return _losses(arguments)
    if arguments.load and 1 not in arguments.concurrency:
        raise ConfigError("--load needs 1 among --concurrency: diffusers' capacity is measured there", field="load")
    # slow imports (torch, matplotlib) that --help must not need
    import yaml

    from segue.bench.diffusion.diffusion import DiffusionBench, run
    from segue.bench.diffusion.report import markdown, plot
    from segue.bench.harness.load_report import result_path, write_report
    from segue.bench.harness.result_file import write_result

    path = result_path(arguments.out, "diffusion")
    bench = DiffusionBench(
        model_dir=_model(arguments).resolve(),
        sizes=list(dict.fromkeys(arguments.sizes)),
        concurrency=sorted(set(arguments.concurrency)),
        requests=arguments.requests,
        rounds=arguments.rounds,
        load=arguments.load,
        arrivals=arguments.arrivals,
        guidance=arguments.guidance,
        most_difference=arguments.most_difference or _agreed(arguments),
        step_caches=arguments.step_cache,
        threads=arguments.threads,
        dtype=arguments.dtype,
        seed=arguments.seed,
        config=yaml.safe_load(arguments.config.read_text()) if arguments.config is not None else {},
        keep=lambda so_far: write_result(so_far, path),
        say=progress,
    )
    result = asyncio.run(run(bench))
    write_report(result, path, markdown, plot)
    return 0


def _agreed(arguments: argparse.Namespace) -> int:
    """The allowed difference of images. Other presets' weights may amplify rounding, and a user's model is unknown."""
    known = arguments.model is None and arguments.preset == "qwen-image" and arguments.dtype == "float32"
    return 2 if known else 255


def _losses(arguments: argparse.Namespace) -> int:
    import yaml

    from segue.bench.diffusion.loss_sides import FewSteps
    from segue.bench.diffusion.losses import LossBench, markdown, run
    from segue.bench.harness.load_report import result_path, write_report
    from segue.bench.harness.result_file import write_result

    path = result_path(arguments.out, "losses")
    bench = LossBench(
        model_dir=_model(arguments).resolve(),
        size=arguments.sizes[0],
        requests=arguments.requests,
        rounds=arguments.rounds,
        guidance=arguments.guidance,
        step_caches=arguments.step_cache or CACHES,
        few_steps=FewSteps(arguments.few_steps, arguments.few_steps_lora and arguments.few_steps_lora.resolve()),
        dtype=arguments.dtype,
        seed=arguments.seed,
        config=yaml.safe_load(arguments.config.read_text()) if arguments.config is not None else {},
        say=progress,
    )
    result = asyncio.run(run(bench))
    write_result(result, path)
    write_report(result, path, markdown)
    return 0


def _model(arguments: argparse.Namespace) -> Path:
    if arguments.model is not None:
        return Path(arguments.model)
    kept = "" if arguments.kept == "float32" else "-bf16"
    target = Path(arguments.cache) / f"{arguments.preset}-{arguments.preset_size}{kept}"
    if not (target / "model_index.json").is_file():
        from segue.bench.harness.checkpoint import keep_in_bfloat16
        from segue.models.registry import tiny_preset
        from segue.models.shared.tiny.made import filled

        preset = tiny_preset(arguments.preset)
        if arguments.preset_size not in preset.sizes:
            known = f"{arguments.preset} has no size {arguments.preset_size!r}; it has {', '.join(preset.sizes)}"
            raise ConfigError(known, field="preset-size")
        with filled(target) as made:
            preset.make(made, arguments.preset_size, 0)
            if kept:
                keep_in_bfloat16(made)
    return target
