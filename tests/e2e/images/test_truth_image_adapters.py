"""A model that makes images, whole: begun from an image, with LoRA adapters that come while it runs, and a worker
that dies and has them again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from truth_system import until

from segue.messages.deltas import ProgressDelta
from segue.messages.errors import InvalidRequest, NotFound
from segue.models.images.flux import tiny
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import Collector

ASKED: dict[str, Any] = {
    "prompt": "a small boat left the harbour in the early morning",
    "height": 64,
    "width": 64,
    "num_inference_steps": 6,
    "max_sequence_length": 32,
    "seed": 3,
}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def omni(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    directory = tmp_path_factory.mktemp("flux")
    tiny.make(directory)
    omni = AsyncOmni(directory, lora={})
    loop.run_until_complete(omni.start())
    yield omni
    loop.run_until_complete(omni.stop())


def adapter(directory: Path) -> Path:
    """For one layer, and it shows."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "transformer.x_embedder.lora_A.weight": torch.randn(4, 64, generator=generator) / 8,
        "transformer.x_embedder.lora_B.weight": torch.randn(32, 4, generator=generator) / 2,
    }
    save_file(tensors, directory / "pytorch_lora_weights.safetensors")
    return directory


async def image(omni: AsyncOmni, **more: Any) -> np.ndarray:
    [image] = (await omni.generate({**ASKED, **more})).images
    return np.asarray(image).astype(int)


def test_begun_from_an_image(loop: asyncio.AbstractEventLoop, omni: AsyncOmni) -> None:
    async def body() -> None:
        given = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
        bare, begun, again = await asyncio.gather(
            image(omni), image(omni, image=given, strength=0.5), image(omni, image=given, strength=0.5)
        )
        assert np.abs(begun - bare).mean() > 5
        assert np.abs(begun - again).max() <= 1
        with pytest.raises(InvalidRequest, match="the request has none"):
            await image(omni, strength=0.5)

    loop.run_until_complete(body())


def test_adapters_while_it_runs(loop: asyncio.AbstractEventLoop, omni: AsyncOmni, tmp_path: Path) -> None:
    async def killed() -> np.ndarray:
        """Asked again where the request was over when its third step was heard."""
        for _ in range(20):
            image, attempts = await killed_once()
            if attempts > 1:
                break
        assert attempts == 2
        return image

    def replaced(dead: int | None) -> bool:
        denoiser = omni.health().stages["denoiser"]
        return denoiser.state == "ready" and denoiser.replicas[0].pid != dead

    async def killed_once() -> tuple[np.ndarray, int]:
        collector = Collector("ink", wants_audio=False)
        dead = None
        async with aclosing(omni.stream(omni.request({**ASKED, "adapter": "ink", "progress": True}))) as deltas:
            async for delta in deltas:
                if isinstance(delta, ProgressDelta) and delta.step == 3 and dead is None:
                    dead = omni.health().stages["denoiser"].replicas[0].pid
                    assert dead is not None
                    os.kill(dead, signal.SIGKILL)
                collector.add(delta)
        await until(lambda: replaced(dead))
        output = collector.output()
        return np.asarray(output.images[0]).astype(int), output.metrics.attempts

    async def body() -> None:
        with pytest.raises(NotFound, match="'ink'"):
            await image(omni, adapter="ink")
        with pytest.raises(InvalidRequest, match="is not a LoRA adapter"):
            await omni.load_lora("ink", tmp_path)
        await omni.load_lora("ink", adapter(tmp_path))
        bare, inked = await asyncio.gather(image(omni), image(omni, adapter="ink"))
        assert np.abs(inked - bare).mean() > 5
        assert np.abs(await killed() - inked).max() <= 1
        assert np.abs(await image(omni) - bare).max() <= 1
        await omni.unload_lora("ink")
        with pytest.raises(NotFound, match="'ink'"):
            await image(omni, adapter="ink")

    loop.run_until_complete(body())
