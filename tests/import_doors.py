"""A contract of import-linter: modules of a package are imported from outside only where its `__init__` names them.

The docstring of every package ends with a line such as "Doors: `engine`, `contract`, `cache.memory`." It may say "every
module", or "the `family` of each", which means that module of each package in it. A door that is a package lets others
through to the doors of that package.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import grimp
from importlinter import Contract, ContractCheck, fields, output

ALL = "*"


class Doors(Contract):
    """`root`: the package whose packages have doors."""

    type_name = "doors"
    root = fields.StringField()

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        root = str(self.root)
        packages = [name for name in graph.modules if name.startswith(f"{root}.") and graph.find_children(name)]
        named = {package: doors_of(_docstring(package)) for package in packages}
        wrong: list[str] = []
        for package, doors in named.items():
            used = set()
            for module in {package, *graph.find_descendants(package)}:
                outside = [
                    importer
                    for importer in graph.find_modules_that_directly_import(module)
                    if importer != package and not importer.startswith(f"{package}.")
                ]
                if not outside:
                    continue
                door = next((one for one in doors if opens(one, module.removeprefix(f"{package}."))), None)
                if door is not None:
                    used.add(door)
                elif module != package:
                    importers = ", ".join(sorted(outside)[:3])
                    wrong.append(f"{module} is no door of {package}, but {importers} imports it")
            wrong += [f"{door!r} is a door of {package} that nobody uses" for door in sorted(doors - used - {ALL})]
        return ContractCheck(kept=not wrong, metadata={"wrong": sorted(wrong)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["wrong"]:
            output.print_error(line)


def doors_of(docstring: str) -> set[str]:
    """Names relative to the package; `*.name` is that module of each package in it, `*` every module."""
    found = re.search(r"^Doors: (.*?)\.$", docstring, re.DOTALL | re.MULTILINE)
    if found is None:
        return set()
    text = " ".join(found[1].split())
    if text.startswith("every module"):
        return {ALL}
    doors = set()
    each = re.match(r"the (.*?) of each", text)
    if each is not None:
        doors |= {f"*.{name}" for name in re.findall(r"`([\w.]+)`", each[0])}
        text = text[each.end() :]
    return doors | set(re.findall(r"`([\w.]+)`", text))


def opens(door: str, module: str) -> bool:
    """Whether `module`, relative to the package, is reached by `door`."""
    if door.startswith("*."):
        return module.partition(".")[2] == door[2:]
    return door == ALL or module == door or module.startswith(f"{door}.")


def _docstring(package: str) -> str:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{package} has no __init__.py")
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
