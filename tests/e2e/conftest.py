"""Running systems, one per deployment, and transformers' answers."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()  # before the tests import transformers

from server_process import Served, served  # noqa: E402
from truth_system import System, Truth  # noqa: E402

from segue.models.omni.qwen2_5_omni.reference import Reference  # noqa: E402


@pytest.fixture(scope="session")
def truth(reference: Reference, assets: Path) -> Truth:
    return Truth(reference, assets)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """The reference takes one core and leaves the others to the workers; other folders find torch as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (yield)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def plain_system(tiny_dir: Path) -> Iterator[System]:
    """Without a deployment file. Starting a system costs seconds: all files that need no other share it."""
    system = System(tiny_dir)
    yield system
    system.close()


@pytest.fixture(scope="module")
def system(request: pytest.FixtureRequest, tiny_dir: Path) -> Iterator[System]:
    """On the `DEPLOYMENT` of the test file, where it has one."""
    deployment: dict[str, Any] | None = vars(request.module).get("DEPLOYMENT")
    if deployment is None:
        yield request.getfixturevalue("plain_system")
        return
    system = System(tiny_dir, **deployment)
    yield system
    system.close()


@pytest.fixture(scope="package")
def plain_server(tiny_dir: Path) -> Iterator[Served]:
    """Without options, for all files that leave its processes alone."""
    with served(tiny_dir) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    """The official client of a file's own server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
