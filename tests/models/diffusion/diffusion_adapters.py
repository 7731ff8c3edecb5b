"""LoRA adapters of a denoiser, in diffusers' files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By layer: A [rank, in] and B [out, rank]."""


def drawn(network: nn.Module, rank: int, seed: int) -> Weights:
    """For every second linear layer, so large that the image is another."""
    generator = torch.Generator().manual_seed(seed)
    layers = [(name, one) for name, one in network.named_modules() if isinstance(one, nn.Linear)][seed % 2 :: 2]
    return {
        name: (
            torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5,
            torch.randn(layer.out_features, rank, generator=generator) / layer.out_features**0.5,
        )
        for name, layer in layers
    }


def write(path: Path, weights: Weights, part: str = "transformer.", header: Mapping[str, Any] | None = None) -> Path:
    """As diffusers writes it."""
    path.mkdir()
    tensors = {f"{part}{name}.lora_A.weight": down for name, (down, _) in weights.items()}
    tensors |= {f"{part}{name}.lora_B.weight": up for name, (_, up) in weights.items()}
    metadata = None if header is None else {"format": "pt", "lora_adapter_metadata": json.dumps(header)}
    save_file(tensors, path / "pytorch_lora_weights.safetensors", metadata=metadata)
    return path
