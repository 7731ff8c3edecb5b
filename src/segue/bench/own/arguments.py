"""The options of `segue bench own`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from segue.bench.harness.arguments import ModelBench, counts, execute, option
from segue.cli.parser import count

NEEDS = ("action_video", "psutil")
SIZES = ("small", "medium")


@dataclass(frozen=True, kw_only=True)
class OwnBench(ModelBench):
    """Settings of a run."""

    size: str = option("small", "of the preset (default: small)", choices=SIZES, exclusive=True)
    workers: Sequence[int] = option([1], "of the trunk, Segue's sides, e.g. 1,2 (default: 1)", type=counts)
    concurrency: Sequence[int] = option([1, 4, 8], "clients (default: 1,4,8)", type=counts)
    frames: int = option(4, "new frames of a request (default: 4)", type=count)
    requests: int = option(8, "per side and round, at least as many as clients (default: 8)", type=count)
    rounds: int = option(3, type=count)


def start(bench: OwnBench) -> int:
    """Run on the checkpoint, or on one that is made."""
    # with torch: not for --help
    from segue.bench.own.checkpoint import make_preset
    from segue.bench.own.own import run
    from segue.bench.own.results import markdown

    if bench.model is None:
        bench = replace(bench, model=make_preset(bench.cache, bench.size))
    return execute(bench, "own", run, markdown)
