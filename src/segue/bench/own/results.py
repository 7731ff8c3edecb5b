"""Results of `segue bench own`, and their report."""

from __future__ import annotations

import msgspec

from segue.bench.harness.report import Columns, host, page, startup_table, table_of
from segue.bench.harness.results import LoadResult
from segue.bench.harness.stats import Ratio, Summary


class Row(msgspec.Struct):
    """One side, in seconds. `jct_ratio`: Segue's JCT by this one's. `equal`: share of requests with Segue's codes.
    `pss_bytes`: peak memory of its processes (`segue.bench.harness.meters`); 0 in older files."""

    clients: int
    side: str
    frames_per_second: float
    first_frame: Summary
    jct: Summary
    jct_ratio: Ratio
    equal: float
    pss_bytes: int = 0


class OwnResult(LoadResult, kw_only=True):
    benchmark: str = "own"
    frames: int
    rows: list[Row] = msgspec.field(default_factory=list)


def markdown(result: OwnResult) -> str:
    columns: Columns[Row] = {
        "clients": lambda row: str(row.clients),
        "side": lambda row: row.side,
        "frames/s": lambda row: f"{row.frames_per_second:.2f}",
        "first frame, s": lambda row: f"{row.first_frame.p50:.2f}",
        f"JCT of {result.frames} frames, s": lambda row: f"{row.jct.p50:.2f}",
        "Segue's JCT of it": lambda row: f"{row.jct_ratio.mean:.2f}×",
        "PSS, MiB": lambda row: f"{row.pss_bytes / 2**20:.0f}" if row.pss_bytes else "–",
        "equal codes": lambda row: f"{row.equal:.0%}",
    }
    of_run = f"{result.finished[:10]}, commit {result.machine.commit}. {host(result.machine, result.machine.packages)}"
    return page([of_run, *result.unfinished, startup_table(result.startup), table_of(result.rows, columns)])
