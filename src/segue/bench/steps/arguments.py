"""The arguments of `segue bench steps`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from segue.bench.harness.arguments import add_device, add_out, check_installed, counts, progress, some_of
from segue.cli.parser import Parser, count
from segue.messages.errors import ConfigError

SHAPES = ("qwen2.5-7b", "qwen3-30b-a3b", "tiny", "tiny-moe")
SIDES = ("segue", "static", "continuous")


def add_steps(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the sub-command and its arguments."""
    steps = commands.add_parser("steps", help="decode steps and prefill against the device's ceilings and transformers")
    model = steps.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="directory with a config.json; weights are random in any case")
    model.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b", help="a published shape (default: qwen2.5-7b)")
    steps.add_argument("--cache", type=Path, default=Path("out"), help="where shapes are written (default: out)")
    add_device(steps)
    steps.add_argument("--batches", type=counts, default=[1, 32, 128], help="sequences (default: 1,32,128)")
    steps.add_argument("--prompt", type=count, default=512, help="tokens before the decode steps (default: 512)")
    steps.add_argument("--output", type=count, default=64, help="tokens of each sequence (default: 64)")
    steps.add_argument("--prefills", type=counts, default=[2048, 8192], help="prompts in tokens (default: 2048,8192)")
    steps.add_argument("--sides", type=some_of(SIDES), default=list(SIDES), help="of segue,static,continuous")
    steps.add_argument("--repeats", type=count, default=3)
    steps.add_argument("--seconds", type=count, default=540, help="nothing new is begun after so long (default: 540)")
    steps.add_argument("--seed", type=int, default=0)
    add_out(steps)
    steps.set_defaults(run=_steps)


def _steps(arguments: argparse.Namespace) -> int:
    check_installed(["matplotlib"])
    if arguments.output < 2:
        raise ConfigError(f"output is {arguments.output}; it must be at least 2: the first token comes from prefill")
    # slow imports (torch, matplotlib) that --help must not need
    from segue.bench.harness.load_report import result_path, write_report
    from segue.bench.harness.result_file import write_result
    from segue.bench.steps.report import markdown, plot
    from segue.bench.steps.steps import StepsBench, run
    from segue.models.text.causal_lm.shapes import write_shape

    directory = arguments.model or write_shape(arguments.cache, arguments.shape)
    path = result_path(arguments.out, f"steps-{directory.name}")
    bench = StepsBench(
        model_dir=directory.resolve(),
        device=arguments.device,
        dtype=arguments.dtype,
        batches=list(dict.fromkeys(arguments.batches)),
        prompt=arguments.prompt,
        output=arguments.output,
        prefills=list(dict.fromkeys(arguments.prefills)),
        sides=arguments.sides,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        seed=arguments.seed,
        keep=lambda so_far: write_result(so_far, path),
        say=progress,
    )
    result = asyncio.run(run(bench))
    write_report(result, path, markdown, plot)
    return 1 if result.failures else 0
