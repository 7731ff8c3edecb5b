"""`make figures`: write the tables of README.md, docs/benchmarks.md and docs/scale.md from the files of bench/results.

`python -m segue.bench.figures` writes these pages; with file arguments it prints their full reports, also of incomplete
runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from segue.bench import comparisons, first_sound, own
from segue.bench.comparisons import Measured
from segue.bench.diffusion import losses
from segue.bench.diffusion import report as diffusion_report
from segue.bench.diffusion.results import DiffusionResult
from segue.bench.harness.results import read_values, result_of
from segue.bench.hop import HopResult, hop_table
from segue.bench.hosts import results as hosts
from segue.bench.omni import report
from segue.bench.omni.results import Result
from segue.bench.plain import comparison as plain
from segue.bench.steps import denoise
from segue.bench.steps import results as steps
from segue.bench.steps.results import StepsResult
from segue.bench.text import report as text_report
from segue.bench.text.results import TextResult
from segue.messages.errors import ConfigError

ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
_KINDS: dict[str, tuple[Any, Callable[[Any], str], Callable[[Any], Measured] | str | None]] = {
    "omni": (Result, report.markdown, comparisons.of_omni),
    "text": (TextResult, text_report.markdown, comparisons.of_text),
    "diffusion": (DiffusionResult, diffusion_report.markdown, comparisons.of_diffusion),
    "losses": (losses.LossResult, losses.markdown, None),
    "own": (own.OwnResult, own.markdown, "A video model of one's own"),
    "bagel": (plain.PlainResult, plain.markdown, "BAGEL"),
    "mimo-audio": (plain.PlainResult, plain.markdown, "MiMo-Audio"),
    "first-sound": (first_sound.SoundResult, first_sound.markdown, "First sound of three models in one graph"),
    "steps": (StepsResult, steps.markdown, "One GPU: steps of a language model"),
    "denoise": (denoise.DenoiseResult, denoise.markdown, "One GPU: a denoiser"),
    "hop": (HopResult, hop_table, "Bytes between workers"),
    "hosts": (hosts.HostsResult, hosts.markdown, "Two hosts"),
}
"""Benchmark → type of its result, its full report, and its part of docs/benchmarks.md: comparisons, or the title of a
section with the full report, where that is short enough. In the order of the page."""


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
    found.sort(key=lambda one: list(_KINDS).index(one[0]))
    sections: list[str] = []
    rows: list[comparisons.Headline] = []
    for kind, result, path in found:
        _, in_full, part = _KINDS[kind]
        measured = None if part is None or isinstance(part, str) else part(result)
        if measured is not None and measured.comparisons:
            sections.append(_section(measured, path))
        elif part is not None:
            title = part if measured is None else f"{measured.title}, without a rival"
            whole = re.sub("^#", "###", in_full(result).strip(), flags=re.MULTILINE)
            between = "\n\n" if whole.startswith("#") else " "
            sections.append(f"### {title}\n\n`bench/results/{path.name}`.{between}{whole}")
        rows += comparisons.headlines(result, measured, path.stem)
    short = [comparisons.headline_table(rows)]
    reckoned = [hosts.scale([result for kind, result, _ in found if kind == "hosts"])]
    made = {}
    for page, body in (("README.md", short), ("docs/benchmarks.md", sections), ("docs/scale.md", reckoned)):
        path = root / page
        made[path] = insert(path.read_text(), "\n\n".join(body))
    return made


def _section(measured: Measured, path: Path) -> str:
    parts = [f"### {measured.title}", f"`bench/results/{path.name}`: {measured.conditions}"]
    parts += [comparisons.comparison_table(measured.comparisons), measured.more]
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
