"""The checkpoints of `segue bench own`: the example's model in two sizes, with random weights, made if absent."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from segue.models.shared.tiny.made import filled

_MEDIUM: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
}
"""Of the trunk. `small`: what `python -m action_video` writes."""


def make_preset(directory: Path, size: str) -> Path:
    """The preset of a size under `directory`, made if absent. Needs `examples/own_model` installed."""
    target = directory / f"action-video-{size}"
    if (target / "model.safetensors").is_file():  # the file that is moved there last
        return target
    importlib.import_module("segue.kernels")  # before transformers: `torchvision_shim`
    author = importlib.import_module("action_video")
    trunk = _MEDIUM if size == "medium" else importlib.import_module("action_video.__main__").TRUNK
    torch.manual_seed(0)
    with filled(target) as made:
        author.ActionVideoForGeneration(author.ActionVideoConfig(trunk=trunk)).save_pretrained(made)
    return target
