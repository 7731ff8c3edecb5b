"""The options of `segue bench diffusion`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from segue.bench.harness.arguments import ModelBench, counts, execute, option
from segue.cli.parser import count
from segue.messages.diffusion import diffusion_from
from segue.messages.errors import ConfigError, InvalidRequest

NEEDS = ("matplotlib", "psutil")
_CORES = len(os.sched_getaffinity(0))


def step_cache(text: str) -> tuple[str, float | None]:
    """`first_block:0.1` → name and threshold. Raises `ArgumentTypeError`."""
    name, _, threshold = text.partition(":")
    try:
        diffusion_from({"step_cache": name, "step_cache_threshold": float(threshold) if threshold else None})
    except (ValueError, InvalidRequest) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, float(threshold) if threshold else None


@dataclass(frozen=True, kw_only=True)
class DiffusionBench(ModelBench):
    """Settings of a run."""

    preset: str = option("qwen-image", "a preset of segue tiny, made if absent (qwen-image)", exclusive=True)
    preset_size: str = option("small", "of the preset (default: small)")
    kept: str = option(
        "float32",
        "type of a preset's weights on the disk; bfloat16 is what models are published in",
        choices=["float32", "bfloat16"],
    )
    sizes: Sequence[int] = option([256, 128], "height and width in pixels (256,128)", type=counts)
    concurrency: Sequence[int] = option([1, 4, 8], "clients (default: 1,4,8)", type=counts)
    requests: int = option(16, "per round with several clients (default: 16)", type=count)
    """Requests per round of a closed loop with several clients; half as many with one."""
    rounds: int = option(3, type=count)
    load: float = option(0.8, "arrivals, of diffusers' capacity; 0: none (0.8)", type=float)
    arrivals: int = option(30, "per round (default: 30)", type=count)
    guidance: float = option(4.0, "of classifier-free guidance; 1: none (4)", type=float)
    most_difference: int | None = option(
        None,
        "levels of 255 by which images of the sides may differ (preset qwen-image: 2; others: not checked)",
        type=count,
    )
    step_cache: Sequence[tuple[str, float | None]] = option(
        [],
        "Segue with this step cache, and Segue without; may be given several times",
        type=step_cache,
        action="append",
        metavar="NAME[:THRESHOLD]",
    )
    losses: bool = option(
        False,
        "instead: Segue with quantised weights and step caches against its own exact images, first of --sizes",
    )
    few_steps: int = option(8, "with --losses: steps of the side with an adapter for few (8)", type=count)
    few_steps_lora: Path | None = option(
        None, "that adapter (default: one that changes nothing)", metavar="PATH", type=Path
    )
    threads: int = option(_CORES, "CPU threads of diffusers (default: all cores)", type=count)
    dtype: str = option("float32", choices=["float32", "bfloat16"])
    config: Path | None = option(None, "deployment file of Segue", type=Path)


def start(bench: DiffusionBench) -> int:
    """Make the preset if it is absent, and run."""
    if bench.load and 1 not in bench.concurrency and not bench.losses:
        raise ConfigError("--load needs 1 among --concurrency: diffusers' capacity is measured there", field="load")
    # with torch and matplotlib: not for --help
    from segue.bench.diffusion import diffusion, losses
    from segue.bench.diffusion.report import markdown, plot
    from segue.bench.harness.checkpoint import preset

    if bench.most_difference is None:
        # other presets' weights may amplify rounding, and a user's model is unknown
        exact = bench.model is None and bench.preset == "qwen-image" and bench.dtype == "float32"
        bench = replace(bench, most_difference=2 if exact else None)
    if bench.model is None:
        known = "model_index.json"
        made = preset(bench.cache, bench.preset, bench.preset_size, known, bench.kept, "preset-size")
        bench = replace(bench, model=made)
    if bench.losses:
        return execute(bench, "losses", losses.run, losses.markdown)
    return execute(bench, "diffusion", diffusion.run, markdown, plot)
