"""The arguments of `segue bench text`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.bench.harness.arguments import add_out, check_installed, counts, progress, some_of
from segue.cli.parser import Parser, count
from segue.graph.deployment.options import QUANTIZATIONS

if TYPE_CHECKING:
    from segue.bench.text.results import TextResult
    from segue.bench.text.workload import Shape

PRESETS = {
    "qwen2-387m": ("qwen2", "387m", "float32"),
    "qwen2-387m-bf16": ("qwen2", "387m", "bfloat16"),
    "qwen3-33m": ("qwen3", "33m", "float32"),
    "qwen3-33m-bf16": ("qwen3", "33m", "bfloat16"),
    "qwen2-tiny": ("qwen2", "tiny", "float32"),
}
"""Family, size, and the type that the weights are kept in on the disk: bfloat16 is what models are published in."""
BASELINES = ("one", "static", "continuous")
KINDS = tuple(kind for kind in QUANTIZATIONS if kind != "none")
NEEDS = ("httpx", "matplotlib", "psutil")


def add_text(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the sub-command and its arguments."""
    text = commands.add_parser("text", help="completions, Segue against transformers and vLLM")
    model = text.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="directory of a checkpoint")
    model.add_argument("--preset", choices=PRESETS, default="qwen2-387m", help="made if absent (default: qwen2-387m)")
    text.add_argument("--cache", type=Path, default=Path("out"), help="where presets are made (default: out)")
    text.add_argument("--shapes", type=_shapes, default="128/64,1024/128", help="prompt/output tokens")
    text.add_argument("--concurrency", type=counts, default=[1, 8, 32], help="clients (default: 1,8,32)")
    text.add_argument("--waves", type=count, default=1, help="requests per client and round (default: 1)")
    text.add_argument("--rounds", type=count, default=2)
    text.add_argument(
        "--baseline", type=some_of(BASELINES), default=list(BASELINES), help="of one,static,continuous; or none"
    )
    text.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM's CPU build; takes part")
    text.add_argument("--vllm-cache-gib", type=count, default=4, help="vLLM's KV cache (default: 4)")
    text.add_argument(
        "--vllm-dtype", choices=["float32", "bfloat16"], help="vLLM computes in that (default: as --dtype)"
    )
    text.add_argument(
        "--quantized",
        type=some_of(KINDS, "quantization"),
        default=[],
        help=f"Segue besides with such weights, of {','.join(KINDS)}",
    )
    text.add_argument("--preload", type=Path, help="library preloaded on every side, e.g. libiomp5.so or an allocator")
    cores = len(os.sched_getaffinity(0))
    text.add_argument("--threads", type=count, default=cores, help="CPU threads of every side (default: all cores)")
    text.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="to compute in")
    text.add_argument("--rates", type=_rates, default=[], help="Poisson arrivals per second, e.g. 0.2,0.5")
    text.add_argument("--arrivals", type=count, default=24, help="per rate and round (default: 24)")
    text.add_argument("--objective", type=_objective, default=(2.0, 0.25), help="TTFT,TPOT seconds of goodput (2,0.25)")
    text.add_argument(
        "--shared-prefix", type=float, default=0.0, help="share, e.g. 0.8: TTFT with and without the cache"
    )
    text.add_argument("--long-prompt", type=int, default=0, help="tokens, e.g. 16384: ITL of others meanwhile")
    text.add_argument("--crowds", type=counts, default=[], help="simultaneous requests, e.g. 1,2,4,8,10,16,32,64")
    text.add_argument("--seed", type=int, default=0)
    add_out(text)
    text.set_defaults(run=_text)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0, with commas between them")
    return rates


def _objective(text: str) -> tuple[float, float]:
    limits = _rates(text)
    if len(limits) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers: TTFT,TPOT in seconds")
    return limits[0], limits[1]


def _shapes(text: str) -> list[Shape]:
    from segue.bench.text.workload import Shape

    shapes = []
    for part in text.split(","):
        prompt, _, output = part.strip().partition("/")
        shapes.append(Shape(count(prompt), count(output)))
    return shapes


def _text(arguments: argparse.Namespace) -> int:
    check_installed(NEEDS)
    # these bring torch and matplotlib: not for --help
    from segue.bench.harness.load_report import result_path, write_report
    from segue.bench.harness.result_file import write_result
    from segue.bench.text.report import markdown, plot
    from segue.bench.text.text import TextBench, run

    path = result_path(arguments.out, "text")
    bench = TextBench(
        model_dir=_model(arguments).resolve(),
        out=path.with_suffix("").resolve(),
        shapes=arguments.shapes,
        concurrency=list(dict.fromkeys(arguments.concurrency)),
        waves=arguments.waves,
        rounds=arguments.rounds,
        baselines=arguments.baseline,
        vllm=arguments.vllm_python,
        vllm_cache_gib=arguments.vllm_cache_gib,
        vllm_dtype=arguments.vllm_dtype or arguments.dtype,
        quantized=arguments.quantized,
        preload=arguments.preload,
        threads=arguments.threads,
        dtype=arguments.dtype,
        seed=arguments.seed,
        rates=arguments.rates,
        arrivals=arguments.arrivals,
        objective=arguments.objective,
        shared_prefix=arguments.shared_prefix,
        long_prompt=arguments.long_prompt,
        crowds=arguments.crowds,
        keep=lambda so_far: write_result(so_far, path),
        say=progress,
    )
    try:
        result = asyncio.run(_until_told(run(bench)))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    write_report(result, path, markdown, plot)
    return 0


async def _until_told(work: Coroutine[Any, Any, TextResult]) -> TextResult:
    """Run the benchmark; when terminated, it stops the servers it has started before it exits."""
    task = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _model(arguments: argparse.Namespace) -> Path:
    if arguments.model is not None:
        return Path(arguments.model)
    from segue.models.shared.tiny.made import filled
    from segue.models.text.causal_lm import tiny
    from segue.parallel.orders import dtype_of

    name, size, kept = PRESETS[arguments.preset]
    target = Path(arguments.cache) / arguments.preset
    if not (target / "config.json").is_file():
        with filled(target) as made:
            tiny.make(name, made, size=size, dtype=dtype_of(kept))
    return target
