"""The running toys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_system import System


@pytest.fixture(scope="package")
def system(toy_dir: Path) -> Iterator[System]:
    system = System(toy_dir)
    yield system
    system.close()
