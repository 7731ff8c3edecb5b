"""Weights of a made checkpoint in the type that models are published in."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def keep_in_bfloat16(directory: Path) -> None:
    """Round the weights of all files in a checkpoint, however deep, to bfloat16, and keep them so."""
    for path in sorted(directory.rglob("*.safetensors")):
        tensors = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
