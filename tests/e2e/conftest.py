"""Running systems, one per deployment and test file, and transformers' answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # before the tests import transformers

from truth_system import System, Truth  # noqa: E402

from library_reference import Reference  # noqa: E402


@pytest.fixture(scope="session")
def truth(reference: Reference, assets: Path) -> Truth:
    return Truth(reference, assets)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The reference takes one core and leaves the others to the workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def system(request: pytest.FixtureRequest, tiny_dir: Path) -> Iterator[System]:
    """On `DEPLOYMENT` of the test file, by default none."""
    deployment: dict[str, Any] = getattr(request.module, "DEPLOYMENT", {})
    system = System(tiny_dir, **deployment)
    yield system
    system.close()
