"""`python -m segue.bench.page [--write PAGE] RESULTS.json...`: the tables of a page, from results of `segue bench`.

Without `--write` they are printed; with it they replace what stands between the page's two marks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from segue.bench.report import hardware, latency_table, ratio_table, stage_table, title
from segue.bench.results import Result, read_result
from segue.messages.errors import ConfigError

BEGIN, END = "<!-- results -->", "<!-- /results -->"


def render(results: Sequence[Result]) -> str:
    """One section per result, in the order given."""
    sections = []
    for result in results:
        sections += [f"### {title(result)}", hardware(result)]
        for level in result.levels:
            sections += [f"Concurrency {level.concurrency}:", latency_table(level), ratio_table(level)]
            sections.append(stage_table(level))
    return "\n\n".join(section for section in sections if section)


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
        body = render([read_result(path) for path in arguments.results])
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
