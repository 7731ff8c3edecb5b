"""Where workers run: what they are started with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from segue.orchestrator.workers.placement import LocalPlacement


def environment(*, gpus: bool = True) -> dict[str, str]:
    """Of a fork server, and so of all workers."""

    async def body() -> dict[str, str]:
        placement = LocalPlacement(
            [],
            gpus=gpus,
            on_spawned=lambda worker, pid: None,
            on_exit=lambda worker, how: None,
            on_lost=lambda: None,
        )
        mine = {child.pid for child in psutil.Process().children()}
        await placement.start()
        try:
            [server] = [child for child in psutil.Process().children() if child.pid not in mine]
            return server.environ()
        finally:
            await placement.close()
            assert not Path(placement.runtime_dir).exists()

    return asyncio.run(body())


@pytest.mark.slow
def test_what_onednn_keeps_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default each of its two caches has room for 1024: half a gigabyte, and more in holes."""
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    given = environment()
    assert given["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert given["LRU_CACHE_CAPACITY"] == "256"


@pytest.mark.slow
def test_gpus_are_counted_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    given = environment()
    assert (given["CUDA_DEVICE_ORDER"], given["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "1")
    assert environment(gpus=False)["CUDA_VISIBLE_DEVICES"] == ""
