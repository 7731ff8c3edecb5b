"""What tests of several rooms share: the toy family, found as an outside package would be, and running systems."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TOYS = str(Path(__file__).parent / "toys")


@pytest.fixture(scope="session")
def toy_path() -> None:
    """Make `segue_toy` an installed package, here and in the workers that tests start."""
    if TOYS not in sys.path:
        sys.path.insert(0, TOYS)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TOYS, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="session")
def toy_dir(toy_path: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the toy family."""
    from segue_toy.family import make

    return make(tmp_path_factory.mktemp("toy"))
