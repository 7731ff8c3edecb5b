"""A `Service` that films: what a diffusion model of video gives, without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
from fake_service import FakeService

from segue.messages.deltas import Delta, Finished, ProgressDelta, RequestMetrics, Usage, VideoDelta
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.request import Request

FPS = 8.0
STEPS = 4


def frames(seed: int, count: int, height: int, width: int) -> np.ndarray:
    """[count, height, width, 3] uint8: flat colours that move with time and depend on the seed."""
    colours = (np.arange(count)[:, None] * 9 + np.array([0, 40, 80]) + 37 * (seed % 1000)) % 200
    return np.broadcast_to(colours[:, None, None, :], (count, height, width, 3)).astype(np.uint8)


def noise(seed: int, count: int, height: int, width: int) -> np.ndarray:
    """The same, of what takes much room in a file."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


async def film(request: Request) -> AsyncGenerator[Delta]:
    """Steps, then the frames in two pieces. A prompt may say: `wait for PATH` (after two steps), `noisy`, `break`."""
    params = request.diffusion or DiffusionParams()
    height, width, count = params.height or 32, params.width or 48, params.num_frames or 17
    if width % 16:
        raise InvalidRequest(f"width is {width}; the nearest: 48 or 64", field="width", stage="input")
    if "tokens" not in request.modalities:
        prompt = request.prompt or ""
        for step in range(STEPS):
            yield ProgressDelta("denoiser", step + 1, STEPS)
            if step == 1 and prompt.startswith("wait for "):
                while not Path(prompt.removeprefix("wait for ")).exists():
                    await asyncio.sleep(0.01)
            if step == 1 and prompt == "break":
                raise StageFailed("it broke", stage="denoiser")
        made = (noise if prompt == "noisy" else frames)(request.seed or 0, count, height, width)
        for first, piece in ((0, made[:5]), (5, made[5:])):
            yield VideoDelta("decoder", piece.tobytes(), len(piece), height, width, FPS, 0, first)
    yield Finished("stop", {}, Usage(), RequestMetrics())


def filmer() -> FakeService:
    service = FakeService(film)
    service.card.name = "filmer"
    service.card.takes = frozenset({"text", "image"})
    service.card.gives = frozenset({"video"})
    service.card.text_stage = None
    service.card.sampling_stages = []
    return service
