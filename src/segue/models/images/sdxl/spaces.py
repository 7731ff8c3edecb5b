"""Convert between the VAE's latents and those that the UNet was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from segue.models.shared.diffusion.loading import component_config


def vae_dtype(model_dir: Path, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the VAE: the published one overflows in float16 (`force_upcast`)."""
    upcast = dtype == torch.float16 and component_config(model_dir, "vae").get("force_upcast", True)
    return torch.float32 if upcast else dtype


def to_network(config: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents [B, 4, h, w] of the VAE → of the UNet. `config`: the VAE's."""
    moved = _by_channel(config, latents)
    if moved is None:
        return latents * config.scaling_factor
    mean, std = moved
    return (latents - mean) * config.scaling_factor / std


def to_vae(config: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_network`."""
    moved = _by_channel(config, latents)
    if moved is None:
        return latents / config.scaling_factor
    mean, std = moved
    return latents * std / config.scaling_factor + mean


def _by_channel(config: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and standard deviation per channel, if the checkpoint has them."""
    if config.latents_mean is None or config.latents_std is None:
        return None
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).reshape(1, -1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    return mean, std
