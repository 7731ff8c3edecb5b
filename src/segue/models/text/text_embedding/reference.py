"""Run transformers' own embedding model with the pooling that the checkpoint's files state, as the reference.

This module reads and applies the files of sentence-transformers itself; it shares no code with the stage. It runs one
text without padding, so pooling covers all of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from segue.models.shared.library import AutoModel
from segue.models.shared.reference import Library, Reference, TextModel

_POOLED: tuple[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("cls", "pooling_mode_cls_token", lambda hidden: hidden[0]),
    ("max", "pooling_mode_max_tokens", lambda hidden: hidden.amax(0)),
    ("mean", "pooling_mode_mean_tokens", lambda hidden: hidden.mean(0)),
    ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens", lambda hidden: hidden.sum(0) / len(hidden) ** 0.5),
    ("weightedmean", "pooling_mode_weightedmean_tokens", lambda hidden: _weighted(hidden)),
    ("lasttoken", "pooling_mode_lasttoken", lambda hidden: hidden[-1]),
)
"""Names in newer and in older files, and their functions of [tokens, H]; several are concatenated in this order."""


def load(library: Library) -> Reference:
    """Raises `ValueError` for a module or a pooling that is not known here."""
    modules = json.loads((library.model_dir / "modules.json").read_text())
    steps = [_step(library.model_dir / module["path"], module["type"]) for module in modules[1:]]

    def head(out: Any, mask: torch.Tensor) -> torch.Tensor:
        vector = out.last_hidden_state[0].float()
        for step in steps:
            vector = step(vector)
        return vector

    return TextModel(library, AutoModel, head)


def _step(folder: Path, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of a module after the network."""
    if kind.endswith(".Normalize"):
        return lambda vector: vector / vector.square().sum().sqrt()
    config = json.loads((folder / "config.json").read_text())
    if kind.endswith(".Pooling"):
        return _pooling(config)
    if not kind.endswith(".Dense"):
        raise ValueError(f"the module {kind!r} is not compared; Pooling, Dense and Normalize are")
    activation = config.get("activation_function", "Tanh")
    if not activation.endswith(("Tanh", "Identity")):
        raise ValueError(f"the activation {activation!r} is not compared; Tanh and Identity are")
    weights = load_file(folder / "model.safetensors")

    def dense(vector: torch.Tensor) -> torch.Tensor:
        made = weights["linear.weight"].to(vector) @ vector
        made = made + weights["linear.bias"].to(vector) if "linear.bias" in weights else made
        return made.tanh() if activation.endswith("Tanh") else made

    return dense


def _pooling(config: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    named = config.get("pooling_mode")
    if named is None:
        chosen = [pool for _, key, pool in _POOLED if config.get(key)]
    else:
        by_name = {name: pool for name, _, pool in _POOLED}
        chosen = [by_name[name] for name in ([named] if isinstance(named, str) else named)]
    if not chosen:
        raise ValueError("the checkpoint names no pooling mode")
    return lambda hidden: torch.cat([pool(hidden) for pool in chosen])


def _weighted(hidden: torch.Tensor) -> torch.Tensor:
    """Weight token i by i."""
    weights = torch.arange(1, len(hidden) + 1, device=hidden.device, dtype=hidden.dtype)
    return weights @ hidden / weights.sum()
