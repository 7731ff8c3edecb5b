"""`segue tiny world DIR`: a small checkpoint with random weights, in the form that the family reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from torch import nn

from segue.models.family import TinyPreset
from segue_world.networks import Frames, World


def make(directory: Path, size: str, seed: int) -> None:
    torch.manual_seed(seed)
    directory.mkdir(parents=True, exist_ok=True)
    index = {"_class_name": "WorldPipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    (directory / "model_index.json").write_text(json.dumps(index))
    FlowMatchEulerDiscreteScheduler().save_pretrained(directory / "scheduler")
    config = {"channels": 4, "width": 32, "actions": 3, "layers": 3}
    _save(directory / "transformer", World(**config), config)
    _save(directory / "vae", Frames(channels=4), {"channels": 4})


def _save(folder: Path, network: nn.Module, config: dict[str, int]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(network.state_dict(), folder / "model.safetensors")


PRESETS = {"world": TinyPreset(sizes=("tiny",), make=make)}
