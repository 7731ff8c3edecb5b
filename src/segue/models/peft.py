"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` in a directory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from segue.kernels.lora import LoraLinear, Pair
from segue.messages.errors import ConfigError, nearest

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])\.weight")
_READ = frozenset(("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"))
_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    )
)
"""Which layers have an adapter is told by the tensors; the rest is for training, or about how weights are stored."""
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # others change the weights below the adapter
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "eva_config": ({},),
}
"""Keys → the values, besides null, false and empty ones, that ask for nothing that is not done."""


def read_adapter(directory: Path, layers: Mapping[str, LoraLinear], max_rank: int) -> dict[str, Pair]:
    """A and scaled B, float32, by name of the layer they are for. Raises `ConfigError` naming file, key or tensor."""
    config = _read_config(directory / CONFIG)
    found: dict[str, dict[str, torch.Tensor]] = {}
    path = directory / WEIGHTS
    if not is_file(path):
        raise ConfigError(f"{path}: not there; adapters are read from safetensors files", field="lora_path")
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                layer, which = _place(path, key, layers)
                found.setdefault(layer, {})[which] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="lora_path") from error
    if not found:
        raise ConfigError(f"{path}: there is no tensor in it", field="lora_path")
    return {layer: scaled_pair(path, layers[layer], tensors, config, max_rank) for layer, tensors in found.items()}


def is_file(path: Path) -> bool:
    """Whether there is one. Raises `ConfigError` where that cannot be told: too long a name, a closed directory."""
    try:
        return path.is_file()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", field="lora_path") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not is_file(path):
        raise ConfigError(f"{path}: not there, so {str(path.parent)!r} is no LoRA adapter", field="lora_path")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="lora_path") from error
    check_config(path, config)
    return config


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Raise `ConfigError` for what cannot be served."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{path}: peft_type is {config.get('peft_type')!r}; only LORA can be served", field="lora_path"
        )
    for key, value in config.items():
        fine = key in _READ or key in _HARMLESS or not value or value in _NOTHING.get(key, ())
        if not fine:
            raise ConfigError(f"{path}: {key} is {value!r}, which cannot be served", field="lora_path")
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"{path}: {key} is {value!r}; it must be a number above 0", field="lora_path")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigError(f"{path}: {key} is {config[key]!r}; it must be a mapping", field="lora_path")


def _place(path: Path, key: str, layers: Mapping[str, LoraLinear]) -> tuple[str, str]:
    """(layer, `A` or `B`) of a tensor."""
    match = _TENSOR.fullmatch(key)
    if match is None:
        raise ConfigError(
            f"{path}: tensor {key!r} is no lora_A or lora_B of a linear layer; nothing else can be served",
            field="lora_path",
        )
    layer = match["layer"].removeprefix(_PREFIX)
    if layer not in layers:
        raise ConfigError(
            f"{path}: tensor {key!r} is for {layer!r}, which is no linear layer of this model's decoder"
            f"{nearest(layer, layers)}",
            field="lora_path",
        )
    return layer, match["which"]


def scaled_pair(
    path: Path, layer: LoraLinear, tensors: dict[str, torch.Tensor], config: dict[str, Any], max_rank: int
) -> Pair:
    """A and scaled B, float32, of a layer; `tensors`: `A` and `B` as stored. Raises `ConfigError`."""
    if len(tensors) != 2:
        raise ConfigError(f"{path}: {layer.name} has lora_{min(tensors)} and not the other", field="lora_path")
    rank = _of_pattern(config.get("rank_pattern"), layer.name, config["r"])
    alpha = _of_pattern(config.get("alpha_pattern"), layer.name, config["lora_alpha"])
    down, up = tensors["A"].float(), tensors["B"].float()
    in_features, out_features = layer.whole
    right = ((rank, in_features), (out_features, rank))
    if (tuple(down.shape), tuple(up.shape)) != right:
        raise ConfigError(
            f"{path}: lora_A and lora_B of {layer.name} are {list(down.shape)} and {list(up.shape)}; its config and "
            f"this model ask for {list(right[0])} and {list(right[1])}",
            field="lora_path",
        )
    if rank > max_rank:
        raise ConfigError(
            f"{path}: {layer.name} has rank {rank}, more than lora.max_rank of this stage ({max_rank})",
            field="lora_path",
        )
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise ConfigError(f"{path}: {layer.name} has weights that are no finite numbers", field="lora_path")
    # Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Pair(down, up * scale)


def _of_pattern(pattern: dict[str, Any] | None, layer: str, default: Any) -> Any:
    """The value for a layer: PEFT's keys are regular expressions for the end of its name."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", layer):
            return value
    return default
