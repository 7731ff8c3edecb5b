"""LoRA adapters in PEFT's files, made here, and checkpoints into which one is merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from segue.models.shared.library import AutoModelForCausalLM, Conv1D

SHARED_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somewhere",
    "inference_mode": True,
    "bias": "none",
    "lora_dropout": 0.05,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "loftq_config": {},
}
"""As PEFT writes it."""


def make_adapter(
    base: Path,
    directory: Path,
    targets: Iterable[str],
    *,
    rank: int,
    seed: int,
    alpha: float = 16.0,
    of: Any = AutoModelForCausalLM,
    within: str = "",
    **config: Any,
) -> Path:
    """Random A and B for every linear layer of the decoder whose name ends in one of `targets`, about as large as the
    weights they are added to. `of`: the class that loads the model; `within`: the decoder's name in it."""
    ends = tuple(targets)
    directory.mkdir(parents=True, exist_ok=True)
    written = {**SHARED_CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": list(ends), **config}
    (directory / "adapter_config.json").write_text(json.dumps(written))
    generator = torch.Generator().manual_seed(seed)
    model = of.from_pretrained(base, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and name.startswith(within) and name.rpartition(".")[2] in ends:
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            rows, columns = weight.shape
            size = float(weight.detach().std()) / scale_of(written)
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            tensors[f"base_model.model.{name}.lora_B.weight"] = (
                torch.randn(rows, rank, generator=generator) * size / rank**0.5
            )
    assert tensors, f"nothing is called {ends}"
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def scale_of(config: dict[str, Any]) -> float:
    """What B A is multiplied by."""
    return config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])


def merge(base: Path, adapter: Path, directory: Path, of: Any = AutoModelForCausalLM) -> Path:
    """The checkpoint with `W + scale B A` in the place of W: what transformers is asked in the adapter's stead."""
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = of.from_pretrained(base, dtype=torch.float32)
    for key in tensors:
        if not key.endswith("lora_A.weight"):
            continue
        module = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        added = scale_of(config) * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        with torch.no_grad():
            module.weight += added.T if isinstance(module, Conv1D) else added
    model.save_pretrained(directory)
    for path in base.iterdir():
        if path.is_file() and "safetensors" not in path.name and not (directory / path.name).exists():
            shutil.copy(path, directory)
    return directory
