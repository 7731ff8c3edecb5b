"""The inputs of a denoiser's request: conditions, parameters, and the input image with its mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from segue.engines.contract import Payload, StageRequest
from segue.engines.diffusion.contract import Sample
from segue.kernels.linear.lora import Lora
from segue.messages.diffusion import DiffusionParams


@dataclass(frozen=True, slots=True)
class Start:
    """The image that a request begins with; tensors are [1, …], in the layout that the scheduler works on."""

    image: torch.Tensor
    """The image's latents, without noise."""
    mask: torch.Tensor | None
    """1 where the image is repainted, 0 where it is kept; None: all of it is repainted."""


def noised(scheduler: Any, image: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Latents of an image with the noise level that the scheduler expects at its next step; `timestep`: a scalar."""
    if "scale_noise" in dir(scheduler):  # only flow schedulers have it
        mixed = scheduler.scale_noise(image, timestep[None], noise)
    else:
        mixed = scheduler.add_noise(image, noise, timestep[None])
    assert isinstance(mixed, torch.Tensor)
    return mixed


def keeper(start: Start, noise: torch.Tensor) -> Callable[[Sample], torch.Tensor] | None:
    """`Sample.mend`: after each step, replaces the kept area by the image, with the noise that the next step expects;
    after the last, without noise (RePaint, Lugmayr et al. 2022, eq. 8, as in diffusers' pipelines: always with the same
    noise). None without a mask. `noise`: the sample's initial noise."""
    mask = start.mask
    if mask is None:
        return None

    def mend(sample: Sample) -> torch.Tensor:
        known = start.image
        if sample.remaining:
            known = noised(sample.scheduler, known, noise, sample.timestep)
        return ((1 - mask) * known + mask * sample.latents).to(sample.latents)

    return mend


@dataclass(slots=True)
class Given:
    """The inputs of a request that have arrived, kept until its samples are made."""

    request: StageRequest
    inputs: dict[str, list[Payload]] = field(default_factory=dict)
    """By upstream stage: its chunks, in order."""
    final: set[str] = field(default_factory=set)
    params: DiffusionParams = field(default_factory=DiffusionParams)
    """With the family's defaults; set when all inputs have arrived."""

    adapter: Lora | None = None
    """The request's LoRA adapter."""
    start: Start | None = None
    """The input image; set when the samples are made."""
    state: Any = None
    """For the family's own use while the samples are made."""

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask of the input image: [h, w] of latents, 1 where repainted, else 0."""
        chunks = self.inputs.get("input", [])
        mask = chunks[0].get("mask") if chunks else None
        assert mask is None or isinstance(mask, torch.Tensor)
        return mask

    def texts(self, device: torch.device, stage: str = "text_encoder") -> list[dict[str, torch.Tensor]]:
        """The text encoder's tensors for each item, in order."""
        return self.encoded(device, stage, "texts")

    def images(self, device: torch.device, stage: str = "vae_encoder") -> list[dict[str, torch.Tensor]]:
        """The image encoder's tensors for each item, in order; empty if the request does not visit that stage."""
        return self.encoded(device, stage, "images") if stage in self.inputs else []

    def encoded(self, device: torch.device, stage: str, key: str) -> list[dict[str, torch.Tensor]]:
        """An encoder's tensors for each item, in order; `key`: the payload key of its items."""
        [payload] = self.inputs[stage]
        return [{name: tensor.to(device) for name, tensor in item.items()} for item in payload[key]]
