"""`python -m segue.bench.page [--write PAGE] RESULTS.json...`: the tables of a page, from results of `segue bench`.

Without `--write` they are printed; with it they replace what stands between the page's two marks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from segue.bench import diffusion_report, losses, text_report
from segue.bench.diffusion_results import DiffusionResult
from segue.bench.report import hardware, latency_table, ratio_table, stage_table, title
from segue.bench.result_file import read_values, result_of
from segue.bench.results import Result
from segue.bench.text_results import TextResult
from segue.messages.errors import ConfigError

BEGIN, END = "<!-- results -->", "<!-- /results -->"


def render(paths: Sequence[Path]) -> str:
    """One section per file, in the order given, also of a run that is not finished. Raises `ConfigError`."""
    return "\n\n".join(_section(path).strip() for path in paths)


def _section(path: Path) -> str:
    values = read_values(path)
    match values.get("benchmark"):
        case "omni":
            return _omni(result_of(values, Result, path))
        case "text":
            return _deeper(text_report.markdown(result_of(values, TextResult, path)))
        case "diffusion":
            return _deeper(diffusion_report.markdown(result_of(values, DiffusionResult, path)))
        case "losses":
            return _deeper(losses.markdown(result_of(values, losses.LossResult, path)))
        case other:
            raise ConfigError(f"{path}: there are no tables of benchmark {other!r}", field="results")


def _omni(result: Result) -> str:
    sections = [f"### {title(result)}", hardware(result), result.unfinished]
    for level in result.levels:
        sections += [f"Concurrency {level.concurrency}:", latency_table(level), ratio_table(level)]
        sections.append(stage_table(level))
    return "\n\n".join(section for section in sections if section)


def _deeper(text: str) -> str:
    """Every heading one level down: that of a report is a page's own."""
    return re.sub(r"^#", "##", text, flags=re.MULTILINE)


def insert(page: str, body: str) -> str:
    """The page with `body` between its marks. Raises `ConfigError` where it has none."""
    before, opened, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (opened and closed):
        raise ConfigError(f"the page has no {BEGIN} … {END}", field="write")
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m segue.bench.page", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of `segue bench`")
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    arguments = parser.parse_args(argv)
    try:
        body = render(arguments.results)
        if arguments.write is None:
            print(body)
        else:
            arguments.write.write_text(insert(arguments.write.read_text(), body))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
