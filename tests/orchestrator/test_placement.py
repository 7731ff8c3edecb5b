"""Where workers run: what they are started with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from segue.orchestrator.placement import LocalPlacement


def environment() -> dict[str, str]:
    """Of a fork server, and so of all workers."""

    async def body() -> dict[str, str]:
        placement = LocalPlacement(
            [], on_spawned=lambda worker, pid: None, on_exit=lambda worker, how: None, on_lost=lambda: None
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


def test_what_onednn_keeps_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default each of its two caches has room for 1024: half a gigabyte, and more in holes."""
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    given = environment()
    assert given["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert given["LRU_CACHE_CAPACITY"] == "256"
