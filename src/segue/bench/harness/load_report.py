"""Parts that the reports of several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from segue.bench.harness.load_results import LoadResult

R = TypeVar("R")


def result_path(out: Path, benchmark: str) -> Path:
    """A new file for a run's result: `BENCHMARK.json` in `out`, or `BENCHMARK-2.json` and so on, so that neither this
    file nor its report replaces those of an earlier run."""
    out.mkdir(parents=True, exist_ok=True)
    path, number = out / f"{benchmark}.json", 1
    while any(path.with_suffix(ending).exists() for ending in (".json", ".md", ".png", "")):
        number += 1
        path = out / f"{benchmark}-{number}.json"
    return path


def write_report(
    result: R,
    path: Path,
    markdown: Callable[[R], str],
    plot: Callable[[R, Path], None] | None = None,
) -> None:
    """Write the tables, and a plot if requested, next to the result at `path`; print the tables and the names of
    written files."""
    written = [path, path.with_suffix(".md")]
    text = markdown(result)
    written[1].write_text(text)
    if plot is not None:
        written.append(path.with_suffix(".png"))
        plot(result, written[2])
    print(text)
    print("\n".join(f"written: {one}" for one in written))


def head(result: LoadResult, title: str, packages: dict[str, str], settings: str, rounds: int, seed: int) -> list[str]:
    """Title, machine and settings, progress, and each side's start-up time."""
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


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@contextmanager
def drawn(path: Path, title: str, size: tuple[float, float], *, rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Axes [rows, columns] of an image of `size` inches, written to `path` as PNG when the block ends."""
    import matplotlib as mpl

    mpl.use("Agg")  # a backend that needs no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    yield axes
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
