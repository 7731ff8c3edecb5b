"""`segue bench`: its sub-commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from segue.bench import own
from segue.bench.diffusion import arguments as diffusion
from segue.bench.gpu_check import add_gpu
from segue.bench.harness.arguments import add_command
from segue.bench.hosts import arguments as hosts
from segue.bench.omni import arguments as omni
from segue.bench.plain import bagel, mimo_audio
from segue.bench.plain import comparison as plain
from segue.bench.steps import arguments as steps
from segue.bench.text import arguments as text
from segue.cli.parser import Parser


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
    said = "mixed multimodal requests, Segue against transformers' generate"
    add_command(commands, "omni", said, omni.OmniBench, omni.start, omni.NEEDS)
    said = "completions, Segue against transformers and vLLM"
    add_command(commands, "text", said, text.TextBench, text.start, text.NEEDS)
    said = "images, Segue against diffusers' pipelines"
    add_command(commands, "diffusion", said, diffusion.DiffusionBench, diffusion.start, diffusion.NEEDS)
    said = "a denoiser against the device's ceiling and diffusers' pipelines"
    add_command(commands, "denoise", said, steps.DenoiseBench, steps.start_denoise)
    said = "decode steps and prefill against the device's ceilings and transformers"
    add_command(commands, "steps", said, steps.StepsBench, steps.start_steps, ["matplotlib"])
    said = "attention of one decode step by itself, by backend and batch"
    add_command(commands, "attention", said, steps.AttentionBench, steps.start_attention)
    said = "a video model of one's own that follows actions, Segue against its author's loop"
    add_command(commands, "own", said, own.OwnBench, own.start, own.NEEDS)
    said = "payloads, a model and the orchestrator over two hosts, against a bare socket and one host"
    add_command(commands, "hosts", said, hosts.HostsBench, hosts.start, hosts.NEEDS)
    said = "{}, Segue against a plain PyTorch loop over the same networks"
    for workload, what, options in (
        (mimo_audio.WORKLOAD, "text and speech", plain.PlainBench),
        (bagel.WORKLOAD, "text and images", plain.DrawingBench),
    ):
        add_command(commands, workload.name, said.format(what), options, partial(plain.start, workload), ["psutil"])
    add_gpu(commands)
    return top
