"""Requests that begin with a picture: with its latents and noise, and, where there is a mask, with a part of it that
stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from segue.engines.diffusion.contract import Sample


@dataclass(frozen=True, slots=True)
class Start:
    """What a request begins with; tensors are [1, …], as the scheduler works on them."""

    picture: torch.Tensor
    """Its latents, without noise."""
    mask: torch.Tensor | None
    """1 where it is made anew, 0 where it stays; None: all of it is made anew."""


def noised(scheduler: Any, picture: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Latents of a picture with as much noise as the scheduler has at its next step; `timestep`: a scalar."""
    if "scale_noise" in dir(scheduler):  # those of flows only
        mixed = scheduler.scale_noise(picture, timestep[None], noise)
    else:
        mixed = scheduler.add_noise(picture, noise, timestep[None])
    assert isinstance(mixed, torch.Tensor)
    return mixed


def keeper(start: Start, noise: torch.Tensor) -> Callable[[Sample], torch.Tensor] | None:
    """`Sample.mend`: after each step, what the mask keeps is the picture again, with the noise that the next step
    expects; after the last, without any (RePaint, Lugmayr et al. 2022, eq. 8, as diffusers' pipelines have it: always
    with the same noise). None where nothing is kept. `noise`: what the sample began with."""
    mask = start.mask
    if mask is None:
        return None

    def mend(sample: Sample) -> torch.Tensor:
        known = start.picture
        if sample.remaining:
            known = noised(sample.scheduler, known, noise, sample.timestep)
        return ((1 - mask) * known + mask * sample.latents).to(sample.latents)

    return mend
