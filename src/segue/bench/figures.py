"""`make figures`: write the tables of README.md, docs/benchmarks.md and docs/scale.md from the files of bench/results.

`python -m segue.bench.figures` writes these pages; with file arguments it prints their full reports, also of incomplete
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from segue.bench import first_sound
from segue.bench.comparisons import Measured, comparison_table, of_diffusion, of_omni, of_text
from segue.bench.diffusion import losses
from segue.bench.diffusion import report as diffusion_report
from segue.bench.diffusion.results import DiffusionResult
from segue.bench.harness.results import read_values, result_of
from segue.bench.headlines import headline_table, headlines
from segue.bench.hop import HopResult, hop_table
from segue.bench.hosts.results import HostsResult
from segue.bench.hosts.results import markdown as hosts_report
from segue.bench.hosts.scale import scale
from segue.bench.omni import report
from segue.bench.omni.results import Result
from segue.bench.own.results import OwnResult
from segue.bench.own.results import markdown as own_report
from segue.bench.plain import comparison as plain
from segue.bench.text import report as text_report
from segue.bench.text.results import TextResult
from segue.messages.errors import ConfigError

ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
_KINDS: dict[str, tuple[Any, Callable[[Any], str], Callable[[Any], Measured] | None]] = {
    "omni": (Result, report.markdown, of_omni),
    "text": (TextResult, text_report.markdown, of_text),
    "diffusion": (DiffusionResult, diffusion_report.markdown, of_diffusion),
    "losses": (losses.LossResult, losses.markdown, None),
    "own": (OwnResult, own_report, None),
    "bagel": (plain.PlainResult, plain.markdown, None),
    "mimo-audio": (plain.PlainResult, plain.markdown, None),
    "first-sound": (first_sound.SoundResult, first_sound.markdown, None),
    "hop": (HopResult, hop_table, None),
    "hosts": (HostsResult, hosts_report, None),
}
"""Benchmark → type of its result, its full report, its comparisons."""
_ORDER = tuple(_KINDS)
_TABLES = {
    "own": "A video model of one's own",
    "bagel": "BAGEL",
    "mimo-audio": "MiMo-Audio",
    "first-sound": "First sound of three models in one graph",
    "hop": "Bytes between workers",
    "hosts": "Two hosts",
}
"""Title of the section of each benchmark whose full report is short enough for the page."""


def read(path: Path) -> tuple[str, Any]:
    """The benchmark's name and the result. Raises `ConfigError`."""
    values = read_values(path)
    kind = values.get("benchmark")
    if kind not in _KINDS:
        raise ConfigError(f"{path}: benchmark is {kind!r}; it must be one of {', '.join(_KINDS)}", field="results")
    return kind, result_of(values, _KINDS[kind][0], path)


def full(path: Path) -> str:
    """The full report of one file."""
    kind, result = read(path)
    return _KINDS[kind][1](result)


def pages(root: Path) -> dict[Path, str]:
    """The pages, generated from the results of this checkout. Raises `ConfigError`."""
    found = [(*read(path), path) for path in sorted((root / "bench" / "results").glob("*.json"))]
    found.sort(key=lambda one: _ORDER.index(one[0]))
    measured = [of(result) if (of := _KINDS[kind][2]) is not None else None for kind, result, _ in found]
    sections = [_section(one, path) for one, (_, _, path) in zip(measured, found, strict=True) if one is not None]
    for kind, result, path in found:
        if kind in _TABLES:
            sections.append(f"### {_TABLES[kind]}\n\n`bench/results/{path.name}`. {_KINDS[kind][1](result).strip()}")
    rows = [
        row for one, (_, result, path) in zip(measured, found, strict=True) for row in headlines(result, one, path.stem)
    ]
    short = [headline_table(rows)]
    reckoned = [scale([result for kind, result, _ in found if kind == "hosts"])]
    made = {}
    for page, body in (("README.md", short), ("docs/benchmarks.md", sections), ("docs/scale.md", reckoned)):
        path = root / page
        made[path] = insert(path.read_text(), "\n\n".join(body))
    return made


def _section(measured: Measured, path: Path) -> str:
    parts = [f"### {measured.title}", f"`bench/results/{path.name}`: {measured.conditions}"]
    parts += [comparison_table(measured.comparisons), measured.more]
    return "\n\n".join(part for part in parts if part)


def insert(page: str, body: str) -> str:
    """The page with `body` between its markers. Raises `ConfigError` if it has none."""
    before, opened, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (opened and closed):
        raise ConfigError(f"the page has no {BEGIN} … {END}", field="page")
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m segue.bench.figures", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of `segue bench`, to be printed in full")
    results: Sequence[Path] = parser.parse_args(argv).results
    try:
        if results:
            print("\n".join(full(path) for path in results))
        else:
            for path, text in pages(ROOT).items():
                path.write_text(text)
                print(f"written: {path.relative_to(ROOT)}")
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
