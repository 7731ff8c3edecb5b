"""Format the printed report and the JSON for a bug report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from segue.bench.harness.hardware import Machine
from segue.verify.compare import TOLERANCES, Row, Tolerance, Verdict

EQUAL, DIFFERENT, NOT_RUN = 0, 1, 2
_COLUMNS = ("stage", "output", "request", "dtype", "served", "verdict", "difference", "tolerance", "library", "Segue")


class LeftOut(msgspec.Struct):
    """A pass that was not run."""

    dtype: str
    reason: str


class Report(msgspec.Struct, kw_only=True):
    """The report of one run. It has no path of the machine, and only the fixed requests."""

    status: int
    architectures: list[str]
    family: str
    stored_dtype: str
    weight_bytes: int
    """As stored."""
    device: str
    versions: dict[str, str]
    machine: Machine
    config: dict[str, object]
    """The checkpoint's config.json or model_index.json."""
    deployment: dict[str, object]
    rows: list[Row]
    left_out: list[LeftOut]
    tolerances: dict[str, Tolerance] = msgspec.field(default_factory=lambda: TOLERANCES)
    seconds: float = 0.0


def status_of(rows: Sequence[Row], left_out: Sequence[LeftOut] = ()) -> int:
    """Return the exit status: a difference outranks a missing comparison (or pass left out); ties count as equal."""
    verdicts = {row.verdict for row in rows}
    if "DIFFERENT" in verdicts:
        return DIFFERENT
    return NOT_RUN if left_out or "FAILED" in verdicts or not verdicts & {"equal", "tie"} else EQUAL


def table(rows: Sequence[Row]) -> str:
    """Return the table: one line per row, columns as wide as their contents."""
    lines = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    rule = tuple("-" * width for width in widths)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (lines[0], rule, *lines[1:]))


def _cells(row: Row) -> tuple[str, ...]:
    compared = row.verdict not in ("FAILED", "skipped")
    return (
        *(row.stage, row.kind, row.question, row.dtype, row.served if compared else "", row.verdict),
        *(row.figure if compared else "", row.tolerance),
        *(f"{seconds:.1f} s" if compared else "" for seconds in (row.library_seconds, row.segue_seconds)),
    )


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return lines on what was not compared, and why, which is too long for a cell."""
    return [
        f"{row.verdict}: {row.question} ({row.dtype}): {row.figure}"
        for row in rows
        if row.verdict in ("FAILED", "skipped")
    ]


def conclusion(report: Report) -> str:
    """Return the last line of the report."""
    counts = Counter(row.verdict for row in report.rows)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])
    within = " and ".join(dict.fromkeys(row.dtype for row in report.rows if row.verdict in ("equal", "tie")))
    if report.left_out and status_of(report.rows) == EQUAL:
        missing = "; ".join(f"{one.dtype} was not compared: {one.reason}" for one in report.left_out)
        return f"EQUAL WITHIN {within} ONLY; {missing} ({said})"
    what = {
        EQUAL: f"EQUAL within {within}: Segue computes what the library computes",
        DIFFERENT: "DIFFERENT: Segue does not compute what the library computes; please report it, with --json FILE",
        NOT_RUN: "NOT VERIFIED: not everything could be compared",
    }[report.status]
    return f"{what} ({said or 'no rows'})"


def write(report: Report, path: Path, hidden: dict[str, str]) -> None:
    """Write the report as JSON. `hidden`: texts that must not be in it → their replacements. Raises `OSError`."""
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    for secret, shown in hidden.items():
        text = text.replace(secret, shown)
    path.write_text(text + "\n")
