"""What a request brings to a denoiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from segue.engines.contract import Payload, StageRequest
from segue.kernels.lora import Lora
from segue.messages.diffusion import DiffusionParams
from segue.models.diffusion.start import Start


@dataclass(slots=True)
class Given:
    """What has come of a request, until its samples are made."""

    request: StageRequest
    inputs: dict[str, list[Payload]] = field(default_factory=dict)
    """By upstream: its chunks, in order."""
    final: set[str] = field(default_factory=set)
    params: DiffusionParams = field(default_factory=DiffusionParams)
    """With the family's defaults; set when all is there."""

    adapter: Lora | None = None
    """The LoRA adapter it is served with."""
    start: Start | None = None
    """The picture it begins with; set when the samples are made."""
    state: Any = None
    """The family's own, while the samples are made."""

    @property
    def mask(self) -> torch.Tensor | None:
        """Which latents of its picture are made anew: [h, w], 1 or 0."""
        chunks = self.inputs.get("input", [])
        mask = chunks[0].get("mask") if chunks else None
        assert mask is None or isinstance(mask, torch.Tensor)
        return mask

    def texts(self, device: torch.device, stage: str = "text_encoder") -> list[dict[str, torch.Tensor]]:
        """What a text encoder made of each item, in order."""
        return self.encoded(device, stage, "texts")

    def pictures(self, device: torch.device, stage: str = "vae_encoder") -> list[dict[str, torch.Tensor]]:
        """What a picture encoder made of each item, in order; none where the request's walk does without it."""
        return self.encoded(device, stage, "pictures") if stage in self.inputs else []

    def encoded(self, device: torch.device, stage: str, key: str) -> list[dict[str, torch.Tensor]]:
        """What an encoder made of each item, in order; `key`: of its items."""
        [payload] = self.inputs[stage]
        return [{name: tensor.to(device) for name, tensor in item.items()} for item in payload[key]]
