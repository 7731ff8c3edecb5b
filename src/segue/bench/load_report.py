"""What the reports of `segue bench text` and `segue bench diffusion` have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from segue.bench.load_results import LoadResult, ResultT
from segue.bench.report import table


def result_path(out: Path, benchmark: str) -> Path:
    """Where a run keeps what it has measured."""
    out.mkdir(parents=True, exist_ok=True)
    return out / f"{benchmark}.json"


def write_report(
    result: ResultT, path: Path, markdown: Callable[[ResultT], str], plot: Callable[[ResultT, Path], None]
) -> None:
    """The tables and the plot beside the result at `path`; prints the tables, and what was written."""
    tables, picture = path.with_suffix(".md"), path.with_suffix(".png")
    text = markdown(result)
    tables.write_text(text)
    plot(result, picture)
    print(text)
    print("\n".join(f"written: {one}" for one in (path, tables, picture)))


def head(result: LoadResult, title: str, packages: dict[str, str], settings: str, rounds: int, seed: int) -> list[str]:
    """Title, machine and what was run, how far it came, and how long every side took to start."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    load = ", ".join(f"{value:.1f}" for value in machine.load_average)
    parts = [
        f"## {title}, {result.finished[:10]}",
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_bytes / 2**30:.0f} GiB; {machine.system}, "
        f"Python {machine.python}, {versions}. {settings} Load average at the start: {load}. "
        f"{rounds} rounds, sides in turn; seed {seed}.",
    ]
    if result.unfinished:
        parts.append(result.unfinished)
    return [*parts, table(["side", "start-up (s)"], [[side, f"{took:.1f}"] for side, took in result.startup.items()])]
