"""Mends torchvision before any test of this folder imports transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()

from rank_process import Second  # noqa: E402
from row_rank_process import Followers  # noqa: E402


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, until the module's tests are over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def second_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    """Starting it costs seconds: all files share it."""
    process = Second(tmp_path_factory.mktemp("ranks"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def second(one_thread: None, second_process: Second) -> Second:
    """Another process that follows this one; each computes with one thread."""
    return second_process


@pytest.fixture(scope="package")
def followers() -> Iterator[Followers]:
    """Of denoisers. Reading the libraries costs seconds: all tests share the process that has."""
    followers = Followers()
    yield followers
    followers.close()
