"""The options of `segue bench omni`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from segue.bench.harness.arguments import ModelBench, counts, execute, option, some_of
from segue.cli.parser import count

BASELINES = ("one", "static")
SIZES = ("tiny", "small")
SHAPES = ("7b",)
NEEDS = ("matplotlib", "psutil")
_ASSETS = Path(__file__).parents[4] / "assets"


@dataclass(frozen=True, kw_only=True)
class OmniBench(ModelBench):
    """Settings of a run."""

    size: str = option("small", "a frozen preset, made if absent (default: small)", choices=SIZES, exclusive=True)
    shape: str | None = option(
        None,
        "a published shape without weights; implies --load-format dummy",
        choices=SHAPES,
        exclusive=True,
    )
    assets: Path = option(_ASSETS, "photo, speech and video", type=Path)
    config: Path | None = option(None, "deployment file of Segue", type=Path)
    threads: int | None = option(None, "CPU threads of the baseline (default: as many as cores)", type=count)
    concurrency: Sequence[int] = option([1, 8], "clients, e.g. 1,8", type=counts)
    requests: int = option(16, "per round and side (default: 16)", type=count)
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

    if bench.shape is not None:
        bench = replace(bench, model=make_shape(bench.cache, bench.shape))
    elif bench.model is None:
        bench = replace(bench, model=make_preset(bench.cache, bench.size))
    return execute(bench, "omni", run, markdown, plot)
