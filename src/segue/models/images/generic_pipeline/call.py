"""Read the arguments of a pipeline's call from the library's source: importing a pipeline takes torch and seconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "diffusers"


@lru_cache(maxsize=8)
def arguments_of(kind: str) -> frozenset[str] | None:
    """The argument names of `__call__` of a pipeline class; None if the library has no such class, or the class has no
    `__call__` of its own."""
    declared = re.compile(rf"^class {re.escape(kind)}\b", re.MULTILINE)
    for path in _sources():
        source = path.read_text(encoding="utf-8")
        if declared.search(source) is None:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == kind:
                return _call(node)
    return None


def _sources() -> Iterator[Path]:
    spec = find_spec(LIBRARY)  # finding a top-level package runs none of its code
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(folder, "pipelines").rglob("pipeline_*.py"))


def _call(kind: ast.ClassDef) -> frozenset[str] | None:
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__call__":
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            return frozenset(one.arg for one in given) - {"self"}
    return None
