"""Checkpoints of draft heads in their published layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def random_tensors(shapes: dict[str, Sequence[int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Gains are 1, biases 0, matrices keep the variance of what goes through them."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            made[name] = torch.full(tuple(shape), 1.0 if name.endswith("weight") else 0.0)
        else:
            made[name] = torch.randn(tuple(shape), generator=generator) * shape[-1] ** -0.5
    return made


def layer_shapes(prefix: str, hidden: int, *, wide: int = 1, norm: bool = True) -> dict[str, list[int]]:
    """A Llama layer with half as many heads for keys and values."""
    kv = hidden // 2
    shapes = {
        f"{prefix}self_attn.q_proj.weight": [hidden, hidden * wide],
        f"{prefix}self_attn.k_proj.weight": [kv, hidden * wide],
        f"{prefix}self_attn.v_proj.weight": [kv, hidden * wide],
        f"{prefix}self_attn.o_proj.weight": [hidden, hidden],
        f"{prefix}mlp.gate_proj.weight": [64, hidden],
        f"{prefix}mlp.up_proj.weight": [64, hidden],
        f"{prefix}mlp.down_proj.weight": [hidden, 64],
        f"{prefix}post_attention_layernorm.weight": [hidden],
    }
    if norm:
        shapes[f"{prefix}input_layernorm.weight"] = [hidden]
    return shapes


def eagle_config(hidden: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **more,
    }


def write(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """`model.safetensors` and `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory
