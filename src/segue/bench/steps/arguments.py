"""The options of `segue bench steps`, `denoise` and `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from segue.bench.harness.arguments import DeviceBench, counts, execute, option, some_of
from segue.cli.parser import count
from segue.messages.errors import ConfigError

SIDES = ("segue", "segue-compiled", "static", "continuous")
SHAPES = ("qwen2.5-7b", "qwen3-30b-a3b", "tiny", "tiny-moe")
DENOISE_SIDES = ("segue", "segue-compiled", "eager", "compiled", "fp8", "first-block", "taylorseer")
DENOISE_SHAPES = ("qwen-image", "wan2.2-ti2v-5b", "tiny-image", "tiny-video")
BACKENDS = ("triton", "torch", "flashinfer")


@dataclass(frozen=True, kw_only=True)
class StepsBench(DeviceBench):
    """Settings of `segue bench steps`."""

    model: Path | None = option(
        None, "directory with a config.json; weights are random in any case", type=Path, exclusive=True
    )
    shape: str = option("qwen2.5-7b", "a published shape (default: qwen2.5-7b)", choices=SHAPES, exclusive=True)
    cache: Path = option(Path("out"), "where shapes are written (default: out)", type=Path)
    batches: Sequence[int] = option([1, 32, 128], "sequences (default: 1,32,128)", type=counts)
    prompt: int = option(512, "tokens before the decode steps (default: 512)", type=count)
    output: int = option(64, "tokens of each sequence (default: 64)", type=count)
    prefills: Sequence[int] = option([2048, 8192], "prompts in tokens (default: 2048,8192)", type=counts)
    sides: Sequence[str] = option(["segue", "static", "continuous"], f"of {','.join(SIDES)}", type=some_of(SIDES))
    profile: Sequence[int] = option(
        [], "sequences whose decode steps are run again under torch's profiler, for segue's sides", type=counts
    )
    repeats: int = option(3, type=count)
    seconds: int = option(540, "nothing new is begun after so long (default: 540)", type=count)
    seed: int = option(0, type=int)


def start_steps(bench: StepsBench) -> int:
    if bench.output < 2:
        raise ConfigError(f"output is {bench.output}; it must be at least 2: the first token comes from prefill")
    # with torch and matplotlib: not for --help
    from segue.bench.steps.results import markdown, plot
    from segue.bench.steps.steps import run
    from segue.models.text.causal_lm.shapes import write_shape

    directory = (bench.model or write_shape(bench.cache, bench.shape)).resolve()
    return execute(bench, f"steps-{directory.name}", lambda ready: run(ready, directory), markdown, plot)


@dataclass(frozen=True, kw_only=True)
class DenoiseBench(DeviceBench):
    """Settings of `segue bench denoise`."""

    shape: str = option("qwen-image", "(default: qwen-image)", choices=DENOISE_SHAPES)
    cache: Path = option(Path("out"), "where shapes are written (default: out)", type=Path)
    height: int | None = option(None, "pixels (default: the shape's own)", type=count)
    width: int | None = option(None, "pixels (default: the shape's own)", type=count)
    frames: int | None = option(None, "of a video (default: the shape's own)", type=count)
    steps: int = option(50, "of every request (default: 50)", type=count)
    clients: Sequence[int] = option([1, 4], "requests at once (default: 1,4)", type=counts)
    sides: Sequence[str] = option(list(DENOISE_SIDES), f"of {','.join(DENOISE_SIDES)}", type=some_of(DENOISE_SIDES))
    seconds: int = option(480, "nothing new is begun after so long (default: 480)", type=count)


def start_denoise(bench: DenoiseBench) -> int:
    from segue.bench.steps.denoise import markdown, run  # with torch: not for --help

    return execute(bench, f"denoise-{bench.shape}", run, markdown)


@dataclass(frozen=True, kw_only=True)
class AttentionBench(DeviceBench):
    """Settings of `segue bench attention`."""

    backends: Sequence[str] = option(["triton", "torch"], type=some_of(BACKENDS, "backend"))
    shorter: int = option(1, "divide all lengths by this (default: 1)", type=count)
    tiles: bool = option(False, "other tiles, stages and splits of triton, too")


def start_attention(bench: AttentionBench) -> int:
    from segue.bench.steps.attention import run  # with torch: not for --help

    return run(bench)
