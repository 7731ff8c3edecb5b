"""Reports of results: Markdown tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from segue.bench.harness.hardware import Machine
from segue.bench.harness.results import Growing
from segue.bench.harness.stats import Summary

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


def versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def host(machine: Machine, packages: Mapping[str, str]) -> str:
    """The machine in one sentence, with the versions of `packages`, and its load in another."""
    gpus = f", {'; '.join(machine.gpus)}" if machine.gpus else ""
    load = ", ".join(f"{value:.1f}" for value in machine.load_average)
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_bytes / 2**30:.0f} GiB{gpus}; {machine.system}, "
        f"Python {machine.python}, {versions(packages)}. Load average at the start: {load}."
    )


def of_run(result: Growing) -> str:
    """When, of which commit and where a result was measured."""
    return f"{result.finished[:10]}, commit {result.machine.commit}. {host(result.machine, result.machine.packages)}"


def startup_table(startup: Mapping[str, float]) -> str:
    return table(["side", "start-up (s)"], [[side, f"{took:.1f}"] for side, took in startup.items()])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Columns = Mapping[str, Callable[[R], str]]
"""Title → text of a row's cell."""


def table_of(rows: Iterable[R], columns: Columns[R]) -> str:
    """A Markdown table with a line per row."""
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


NamedColumns = Mapping[str, Callable[[str, R], str]]
"""Title → text of a cell of a named row, from its name and the row."""


def table_by(name: str, rows: Mapping[str, R], columns: NamedColumns[R]) -> str:
    """A Markdown table with a line per named row; `name`: title of the column of names. Empty without rows."""
    lines = [[key, *(cell(key, row) for cell in columns.values())] for key, row in rows.items()]
    return table([name, *columns], lines) if lines else ""


def page(parts: Iterable[str]) -> str:
    """A report of its parts; empty ones are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def three(summary: Summary, digits: int = 2, scale: float = 1.0) -> str:
    """mean / p50 / p99."""
    return " / ".join(f"{scale * value:.{digits}f}" for value in (summary.mean, summary.p50, summary.p99))


def milliseconds(summary: Summary | None) -> str:
    """mean / p50 / p99 of seconds."""
    return "" if summary is None else three(summary, 0, 1000)


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


def bars(axes: Any, scenarios: Iterable[Any], figure: Callable[[Any], float], label: str, digits: int) -> None:
    """Horizontal bars of one figure of every side of scenarios, which have `name` and `sides`. `label`: of the axis."""
    values = {
        one.name.replace(", ", "\n", 1): {side: figure(own) for side, own in one.sides.items()} for one in scenarios
    }
    sides = list(dict.fromkeys(side for own in values.values() for side in own))
    height = 0.8 / max(1, len(sides))
    for number, side in enumerate(sides):
        own = [(place + number * height, one[side]) for place, one in enumerate(values.values()) if side in one]
        made = axes.barh([place for place, _ in own], [value for _, value in own], height, label=side)
        axes.bar_label(made, fmt=f"%.{digits}f", fontsize=7)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(values))], list(values), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize=8)
