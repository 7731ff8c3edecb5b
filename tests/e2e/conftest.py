"""Running systems, one per deployment and test file, and transformers' answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # before the tests import transformers

from library_reference import Reference  # noqa: E402
from truth_system import System, Truth  # noqa: E402


@pytest.fixture(scope="session")
def truth(reference: Reference, assets: Path) -> Truth:
    return Truth(reference, assets)


@pytest.fixture(scope="module")
def system(request: pytest.FixtureRequest, tiny_dir: Path) -> Iterator[System]:
    """On `DEPLOYMENT` of the test file, by default none."""
    deployment: dict[str, Any] = getattr(request.module, "DEPLOYMENT", {})
    system = System(tiny_dir, **deployment)
    yield system
    system.close()
