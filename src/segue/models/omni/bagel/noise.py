"""The random numbers of a request, all from one generator on the CPU: first those of the latents of each image that is
edited, in order, then those of the images that are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.contract import StageRequest


def noise_of_images(request: StageRequest, channels: int, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """[channels, height, width] for each image; `sizes`: (height, width) in latents."""
    return _drawn(request, channels, sizes)[0]


def noise_of_drawing(
    request: StageRequest, channels: int, sizes: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> torch.Tensor:
    """Noise of this shape for what is drawn. `channels`, `sizes`: as in `noise_of_images`."""
    return torch.randn(shape, generator=_drawn(request, channels, sizes)[1])


def seed_of(request: StageRequest) -> int:
    """The seed that all stages of a request have in common, unlike those of their sampling."""
    return request.seed if request.request.seed is None else request.request.seed


def _drawn(
    request: StageRequest, channels: int, sizes: Sequence[tuple[int, int]]
) -> tuple[list[torch.Tensor], torch.Generator]:
    generator = torch.Generator().manual_seed(seed_of(request))
    return [torch.randn((channels, *size), generator=generator) for size in sizes], generator
