"""Mends torchvision before any test of this folder imports transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()

from rank_process import Second  # noqa: E402


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, until the module's tests are over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def second(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    """Another process that follows this one; each computes with one thread."""
    process = Second(tmp_path_factory.mktemp("ranks"))
    yield process
    process.close()
