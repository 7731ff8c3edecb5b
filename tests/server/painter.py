"""A `Service` that paints: what a diffusion model gives, without one."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
from fake_service import FakeService

from segue.messages.deltas import Delta, Finished, ImageDelta, ProgressDelta, RequestMetrics, Usage
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge
from segue.messages.request import Request

STEPS = 4


def pixels(index: int, height: int, width: int) -> np.ndarray:
    """[height, width, 3] uint8: smooth, so that a lossy file of it is near."""
    ramp = np.linspace(0, 200, height * width).reshape(height, width, 1)
    return (ramp + np.array([0, 10, 20]) + 20 * index).astype(np.uint8)


def make_image(index: int, height: int, width: int, partial: int | None = None) -> ImageDelta:
    return ImageDelta("decoder", pixels(index, height, width).tobytes(), height, width, index, partial)


def finished() -> Finished:
    usage = Usage(prompt_tokens=5, prompt_modalities={"text": 5})
    return Finished("stop", {}, usage, RequestMetrics(jct=1.0))


async def paint(request: Request) -> AsyncGenerator[Delta]:
    """Previews after the first steps, then the images. Refuses what a family refuses."""
    params = request.diffusion or DiffusionParams()
    height, width = params.height or 64, params.width or 96
    if width % 16:
        raise InvalidRequest(
            f"width is {width}; this model makes a multiple of 16, the nearest: 64 or 80", field="width", stage="input"
        )
    if params.num_images_per_prompt > 10:
        raise TooLarge(
            f"num_images_per_prompt is {params.num_images_per_prompt}; at most 10 (max_outputs)",
            field="num_images_per_prompt",
            stage="input",
        )
    everyone = range(params.num_images_per_prompt)
    for step in range(STEPS):
        for index in everyone:
            if params.progress:
                yield ProgressDelta("denoiser", step + 1, STEPS, index)
            if step < params.partial_images:
                yield make_image(index, height // 2, width // 2, step)
    for index in everyone:
        yield make_image(index, height, width)
    yield finished()


def painter() -> FakeService:
    service = FakeService(paint)
    service.card.name = "painter"
    service.card.takes = frozenset({"text"})
    service.card.gives = frozenset({"image"})
    service.card.text_stage = None
    service.card.sampling_stages = []
    return service
