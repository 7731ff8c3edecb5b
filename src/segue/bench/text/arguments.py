"""The options of `segue bench text`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from segue.bench.harness.arguments import ModelBench, counts, execute, option, rates, some_of
from segue.bench.text.workload import Shape
from segue.cli.parser import count
from segue.graph.deployment.options import QUANTIZATIONS

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
_CORES = len(os.sched_getaffinity(0))


def _shapes(text: str) -> list[Shape]:
    pairs = [part.strip().partition("/") for part in text.split(",")]
    return [Shape(count(prompt), count(output)) for prompt, _, output in pairs]


def _objective(text: str) -> tuple[float, float]:
    limits = rates(text)
    if len(limits) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers: TTFT,TPOT in seconds")
    return limits[0], limits[1]


@dataclass(frozen=True, kw_only=True)
class TextBench(ModelBench):
    """Settings of a run."""

    preset: str = option("qwen2-387m", "made if absent (default: qwen2-387m)", choices=PRESETS, exclusive=True)
    shapes: Sequence[Shape] = option([Shape(128, 64), Shape(1024, 128)], "prompt/output tokens", type=_shapes)
    concurrency: Sequence[int] = option([1, 8, 32], "clients (default: 1,8,32)", type=counts)
    waves: int = option(1, "requests per client and round (default: 1)", type=count)
    rounds: int = option(2, type=count)
    baseline: Sequence[str] = option(list(BASELINES), "of one,static,continuous; or none", type=some_of(BASELINES))
    vllm_python: Path | None = option(None, "python of an environment with vLLM's CPU build; takes part", type=Path)
    vllm_cache_gib: int = option(4, "vLLM's KV cache (default: 4)", type=count)
    vllm_dtype: str | None = option(
        None, "vLLM computes in that (default: as --dtype)", choices=["float32", "bfloat16"]
    )
    quantized: Sequence[str] = option(
        [], f"Segue besides with such weights, of {','.join(KINDS)}", type=some_of(KINDS, "quantization")
    )
    preload: Path | None = option(None, "library preloaded on every side, e.g. libiomp5.so or an allocator", type=Path)
    threads: int = option(_CORES, "CPU threads of every side (default: all cores)", type=count)
    dtype: str = option("float32", "to compute in", choices=["float32", "bfloat16"])
    rates: Sequence[float] = option([], "Poisson arrivals per second, e.g. 0.2,0.5", type=rates)
    arrivals: int = option(24, "per rate and round (default: 24)", type=count)
    objective: tuple[float, float] = option((2.0, 0.25), "TTFT,TPOT seconds of goodput (2,0.25)", type=_objective)
    shared_prefix: float = option(0.0, "share, e.g. 0.8: TTFT with and without the cache", type=float)
    long_prompt: int = option(0, "tokens, e.g. 16384: ITL of others meanwhile", type=int)
    crowds: Sequence[int] = option([], "simultaneous requests, e.g. 1,2,4,8,10,16,32,64", type=counts)


def start(bench: TextBench) -> int:
    """Make the preset if it is absent, and run."""
    # with torch and matplotlib: not for --help
    from segue.bench.harness.checkpoint import made_once
    from segue.bench.text.report import markdown, plot
    from segue.bench.text.text import run
    from segue.models.text.causal_lm import tiny
    from segue.parallel.wire import dtype_of

    if bench.model is None:
        name, size, kept = PRESETS[bench.preset]
        make = partial(tiny.make, name, size=size, dtype=dtype_of(kept))
        bench = replace(bench, model=made_once(bench.cache / bench.preset, "config.json", make))
    return execute(bench, "text", run, markdown, plot)
