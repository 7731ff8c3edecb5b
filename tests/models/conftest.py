"""Mends torchvision before any test of this folder imports transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()

from rank_process import Second  # noqa: E402


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    """Another process that follows this one; each computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    process = Second(tmp_path_factory.mktemp("ranks"))
    yield process
    process.close()
    torch.set_num_threads(threads)
