"""The options of `segue bench omni`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from segue.bench.harness.arguments import ModelBench, counts, execute, option, rates, some_of
from segue.bench.omni.families import PRESETS
from segue.cli.parser import count
from segue.messages.errors import ConfigError

BASELINES = ("one", "static")
SIZES = ("tiny", "small", "medium")
WORKLOADS = ("mixed", "paper")
SHAPES = ("7b", "30b-a3b")
NEEDS = ("matplotlib", "psutil")
_ASSETS = Path(__file__).parents[4] / "assets"


@dataclass(frozen=True, kw_only=True)
class OmniBench(ModelBench):
    """Settings of a run."""

    preset: str = option(PRESETS[0], f"made if absent (default: {PRESETS[0]})", choices=PRESETS)
    size: str = option("small", "of the preset (default: small)", choices=SIZES, exclusive=True)
    shape: str | None = option(
        None,
        "a published shape without weights; implies --load-format dummy",
        choices=SHAPES,
        exclusive=True,
    )
    workload: str = option("mixed", "mixed: short media; paper: that of vLLM-Omni's paper", choices=WORKLOADS)
    assets: Path = option(_ASSETS, "photo, speech and video", type=Path)
    config: Path | None = option(None, "deployment file of Segue", type=Path)
    threads: int | None = option(None, "CPU threads of the baseline (default: as many as cores)", type=count)
    concurrency: Sequence[int] = option([1, 8], "clients, e.g. 1,8", type=counts)
    rates: Sequence[float] = option([], "also Poisson arrivals per second, e.g. 0.05,0.1", type=rates)
    requests: int | None = option(None, "per round and side (default: 16; of the paper's workload 300)", type=count)
    rounds: int = option(3, type=count)
    warmup: int = option(4, "requests not counted, per side (default: 4)", type=count)
    baseline: Sequence[str] = option(list(BASELINES), "of one,static; or none", type=some_of(BASELINES))
    dtype: str | None = option(
        None, "default: float32 on a CPU, bfloat16 on a GPU", choices=["float32", "bfloat16", "float16"]
    )
    device: str = option("cpu", choices=["cpu", "cuda"])
    load_format: str = option("auto", choices=["auto", "dummy"])

    @property
    def computes(self) -> str:
        """The dtype of all sides."""
        return self.dtype or ("bfloat16" if self.device == "cuda" else "float32")

    @property
    def loads(self) -> str:
        return "dummy" if self.shape is not None else self.load_format


def start(bench: OmniBench) -> int:
    """Run on the checkpoint, or on one that is made."""
    # with torch and matplotlib: not for --help
    from segue.bench.omni.checkpoint import make_preset, make_shape
    from segue.bench.omni.omni import run
    from segue.bench.omni.report import markdown, plot

    if bench.preset != PRESETS[0] and (bench.shape is not None or bench.model is not None):
        raise ConfigError("--preset goes with --size: not with --model or --shape", field="preset")
    if bench.shape is not None:
        bench = replace(bench, model=make_shape(bench.cache, bench.shape))
    elif bench.model is None:
        bench = replace(bench, model=make_preset(bench.cache, bench.size, bench.preset))
    return execute(bench, "omni", run, markdown, plot)
