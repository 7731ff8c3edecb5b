"""CONTRIBUTING's map names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "segue"
ABBREVIATIONS = {"AR/": "engines/autoregressive/"}
_NAMED = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def _defined(path: Path) -> set[str]:
    """The classes, functions and variables of a module, and `Class.method`."""
    names: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    add(ast.parse(path.read_text()).body, "")
    return names


def _file(named: str) -> Path | None:
    for short, long in ABBREVIATIONS.items():
        if named.startswith(short):
            named = long + named.removeprefix(short)
    return next((path for path in (ROOT / named, SOURCE / named) if path.exists()), None)


def test_what_the_map_names_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    [section] = re.findall(r"^## Where things live\n(.*?)^## ", page, flags=re.S | re.M)
    rows = [row for row in section.splitlines() if row.startswith("| ")]
    missing, functions = [], 0
    for row in rows:
        for named, name in _NAMED.findall(row):
            path = _file(named) if "/" in named else ROOT
            if path is None:
                missing.append(named)
            elif name:
                functions += 1
                if name not in _defined(path):
                    missing.append(f"{named}:{name}")
    assert not missing
    assert functions > 20
