"""The tiny checkpoint that the tests of this family share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from bagel_reference import GOLDEN, Bagel

from segue.models.omni.bagel.tiny.presets import make


@pytest.fixture(scope="package")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bagel")
    make(directory)
    recorded: dict[str, str] = json.loads((GOLDEN / "golden.json").read_text())["checkpoint"]
    for name, digest in recorded.items():
        made = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        assert made == digest, f"another tiny checkpoint: run {GOLDEN}/make_golden.py again"
    return directory


@pytest.fixture(scope="package")
def reference(tiny_dir: Path) -> Bagel:
    return Bagel(tiny_dir)
