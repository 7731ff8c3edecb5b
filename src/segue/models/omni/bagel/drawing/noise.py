"""The random numbers of a request, all from one generator on the CPU: first those of the latents of each image that is
edited, in order, then those of the images that are drawn. In a reply of texts and images by turns, those of an image's
latents when it is read again follow those from which it was drawn."""

from __future__ import annotations

import torch

from segue.engines.contract import StageRequest
from segue.models.omni.bagel.drawing.settings import Drawing


def noise_of_images(request: StageRequest, channels: int, drawing: Drawing) -> list[torch.Tensor]:
    """[channels, height, width] for each image that is given."""
    generator = torch.Generator().manual_seed(seed_of(request))
    return [torch.randn((channels, *size), generator=generator) for size in drawing.given]


def noise_of_drawing(
    request: StageRequest, channels: int, drawing: Drawing, shape: tuple[int, ...], visit: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of this shape for what is drawn in a visit, and [channels, height, width] for it when it is read again."""
    generator = torch.Generator().manual_seed(seed_of(request))
    for size in drawing.given:
        torch.randn((channels, *size), generator=generator)
    for _ in range(visit + 1):
        drawn = torch.randn(shape, generator=generator)
        again = torch.randn((channels, *drawing.echo), generator=generator)
    return drawn, again


def seed_of(request: StageRequest) -> int:
    """The seed that all stages of a request have in common, unlike those of their sampling."""
    return request.seed if request.request.seed is None else request.request.seed
