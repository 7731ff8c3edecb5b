"""Writes the table of minutes per folder of CONTRIBUTING.md: `minutes.py REPORT... PAGE`, from what pytest wrote with
`--junitxml`. Prints the slowest tests, which are the ones to look at first."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

SLOWEST = 40
TABLE = re.compile(r"(?<=<!-- minutes -->\n).*?(?=<!-- end of minutes -->)", re.DOTALL)


def main(*reports: str, page: Path) -> None:
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            _, *folders = case.attrib["classname"].split(".")
            folder = folders[0] if len(folders) > 1 else "."
            taken = float(case.attrib["time"])
            seconds[folder] += taken
            tests[folder] += case.find("skipped") is None
            slowest.append((taken, f"{case.attrib['classname']}::{case.attrib['name']}"))
    lines = ["| folder of `tests/` | tests | minutes of one core |", "|---|---|---|"]
    lines += [f"| `{folder}` | {tests[folder]} | {taken / 60:.1f} |" for folder, taken in seconds.most_common()]
    lines += [f"| together | {tests.total()} | {seconds.total() / 60:.1f} |"]
    text, found = TABLE.subn("\n".join(["", *lines, "", ""]), page.read_text())
    if found != 1:
        sys.exit(f"{page} has no lines '<!-- minutes -->' and '<!-- end of minutes -->' for the table")
    page.write_text(text)
    for taken, name in sorted(slowest, reverse=True)[:SLOWEST]:
        print(f"{taken:7.1f} s  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:-1], page=Path(sys.argv[-1]))
