"""The reading path stays short. A module is beside it if its docstring, or that of a package around it, has a paragraph
"Optional reading: …", which says what the rest knows of it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "segue"
PACKAGES = ("messages", "graph", "connectors", "worker", "orchestrator", "engines", "models/omni/qwen2_5_omni")
MOST_LINES = 18_000
MOST_NAMES = 9
"""Most names that the path imports from one optional module or package."""


def _optional(path: Path) -> bool:
    return "\nOptional reading: " in (ast.get_docstring(ast.parse(path.read_text()), clean=False) or "")


def _modules() -> tuple[dict[str, Path], dict[str, str]]:
    """The modules of `PACKAGES` by name, and of the optional ones the outermost optional package around them."""
    modules = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((SOURCE / package).rglob("*.py"))
    }
    skipped = {name for name, path in modules.items() if _optional(path)}
    inside = {}
    for name in modules:
        parts = name.split(".")
        around = [".".join(parts[: end + 1]) for end in range(len(parts))]
        if (first := next((one for one in around if one in skipped), None)) is not None:
            inside[name] = first
    return modules, inside


def test_the_reading_path_stays_short() -> None:
    modules, optional = _modules()
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    assert optional
    assert sum(count for name, count in lines.items() if name not in optional) <= MOST_LINES


def test_what_may_be_skipped_is_known_by_few_names() -> None:
    modules, optional = _modules()
    known: dict[str, set[str]] = defaultdict(set)
    for name in modules.keys() - optional.keys():
        for node in ast.walk(ast.parse(modules[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                source = node.module.removeprefix("segue.")
                for alias in node.names:
                    room = optional.get(source) or optional.get(f"{source}.{alias.name}")
                    if room is not None:
                        known[room].add(alias.name)
    assert known
    assert {room: sorted(names) for room, names in known.items() if len(names) > MOST_NAMES} == {}
