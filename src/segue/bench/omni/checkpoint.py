"""The checkpoints of `segue bench omni`: a frozen preset made if absent, or a published shape without weights."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from segue.bench.harness.checkpoint import preset
from segue.models.registry import tiny_preset
from segue.models.shared.tiny.made import filled

SHAPES = {"7b": "qwen2.5-omni", "30b-a3b": "qwen3-omni"}
"""Published shape → the preset whose other files it takes. `shapes/NAME.json` has the entries of the config.json of
Qwen/Qwen2.5-Omni-7B and Qwen/Qwen3-Omni-30B-A3B-Instruct that determine compute. Token ids stay those of the tiny
checkpoints, whose tokenizer is used with it."""
_REFERENCE_FRAMES = 300
"""Mel frames of the voice's sample: 3 s."""


def make_preset(directory: Path, size: str, name: str = "qwen2.5-omni") -> Path:
    """The preset of a name and size under `directory`, made if absent. Raises `ConfigError` for an unknown size."""
    return preset(directory, name, size, "vocab.json")  # the file that is moved there last


def make_shape(directory: Path, name: str) -> Path:
    """Write config, tokenizer, processor and voices of a published shape under `directory`, without weights."""
    target = directory / f"{SHAPES[name]}-shape-{name}"
    shape = json.loads((Path(__file__).parent / "shapes" / f"{name}.json").read_text())
    with filled(target) as made:
        tiny_preset(SHAPES[name]).make(made, "tiny", 0)
        for path in made.glob("*safetensors*"):
            path.unlink()
        config = overlay(json.loads((made / "config.json").read_text()), shape)
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if (voices := made / "spk_dict.pt").exists():
            frames = torch.randn(1, _REFERENCE_FRAMES, 80, generator=torch.Generator().manual_seed(1))
            entries = torch.load(voices, weights_only=True).items()
            torch.save({voice: {**entry, "ref_mel": 2.0 * frames - 4.0} for voice, entry in entries}, voices)
    return target


def overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`, objects merged key by key."""
    merged = deepcopy(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and key != "rope_scaling":
            merged[key] = overlay(inner, value)
        else:
            merged[key] = deepcopy(value)
    return merged
