"""The door to the kernels: nothing outside names one, and the code for one kind of CPU can be removed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import segue

SOURCE = Path(segue.__file__).parent
KERNELS = SOURCE / "kernels"
WORDS = re.compile(r"(^|_)(native|amx)(_|$)|^_?fused_|_linear$|[Rr]ecorder|^cpu_kernels$|^(Native|Fused|AMX)[A-Z]?")
"""Names of kernels, and of what only some devices have."""
MODULES = re.compile(r"segue\.kernels\.(cpu\b|linear\.(?!(layers|lora|stored)\b)\w+)")
"""Modules for `prepare` and `operations` alone."""


def test_no_kernel_is_named_outside() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(KERNELS):
            continue
        text = path.read_text()
        words = [name for name in names(ast.parse(text)) if WORDS.search(name)]
        words += [match[0] for match in MODULES.finditer(text)]
        found += [f"{path.relative_to(SOURCE)}: {word}" for word in words]
    assert not found


def names(tree: ast.AST) -> Iterator[str]:
    """All identifiers. Strings are none: `native` is a word of diffusers' dispatch of attention."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and field not in ("value", "module"):
                yield from value.split(".")


IMPORTS = """
import importlib, pkgutil, sys
import segue
for module in pkgutil.walk_packages(segue.__path__, "segue."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert not error.name.startswith("segue"), (module.name, error.name)
assert "segue.models.images.qwen_image.folded" in sys.modules
from segue.kernels.cpu_kernels import cpu_kernels, missing
assert cpu_kernels() is None
print(missing())
"""


@pytest.mark.nightly
def test_code_for_one_kind_of_cpu_can_be_removed(tmp_path: Path) -> None:
    root = SOURCE.parents[1]
    shutil.copytree(root / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    shutil.copytree(SOURCE, tmp_path / "src" / "segue", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "src" / "segue" / "kernels" / "cpu")

    def python(*given: str) -> str:
        path = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
        done = subprocess.run([sys.executable, *given], cwd=tmp_path, env=path, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    assert "this installation of Segue has none" in python("-c", IMPORTS)
    parity = "tests/models/text/causal_lm/test_causal_lm_parity.py::test_parity[llama]"
    folded = "tests/models/images/test_qwen_image_folded.py::test_the_same_answers_in_every_kind_of_call"
    assert "3 passed" in python("-m", "pytest", "-q", "-n0", parity, folded)
