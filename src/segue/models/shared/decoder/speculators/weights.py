"""Read a speculator's checkpoint, and fill modules from it. Published heads come in several file formats."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint

FIELD = "speculation.model"

M = TypeVar("M", bound=nn.Module)


def read_values(directory: Path) -> dict[str, Any]:
    """The speculator's `config.json`. Raises `ConfigError` with the file's name."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not there, so {str(directory)!r} is not a checkpoint", field=FIELD)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a JSON object: {error}", field=FIELD) from error


def read_tensors(directory: Path, files: Sequence[str]) -> dict[str, torch.Tensor]:
    """All tensors of the first of these files that exists: safetensors, or a `torch.save` file (tensors only).

    Raises `ConfigError` if none exists or one is unreadable.
    """
    if (directory / INDEX).is_file():
        checkpoint = Checkpoint(directory)
        return {name: checkpoint.read(name) for name in sorted(checkpoint.names)}
    path = next((directory / name for name in files if (directory / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{directory}: it has none of {', '.join(files)}", field=FIELD)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field=FIELD) from error


def filled(
    build: Callable[[], M],
    tensors: Mapping[str, torch.Tensor],
    *,
    where: str,
    device: torch.device,
    dtype: torch.dtype,
    optional: Sequence[str] = (),
) -> M:
    """A module with these tensors by name. `optional`: suffixes of names that become zeros if missing.

    Raises `ConfigError` for a tensor that is missing or of the wrong shape; unused tensors are ignored.
    """
    with init_empty_weights(include_buffers=False):
        module = build()
    state = {}
    for name, empty in module.state_dict().items():
        tensor = tensors.get(name)
        if tensor is None and name.endswith(tuple(optional)):
            tensor = torch.zeros(empty.shape)
        if tensor is None:
            raise ConfigError(f"{where}: no tensor {name!r}", field=FIELD)
        if tensor.shape != empty.shape:
            raise ConfigError(
                f"{where}: tensor {name!r} is {list(tensor.shape)}; the config asks for {list(empty.shape)}",
                field=FIELD,
            )
        state[name] = tensor.to(device=device, dtype=dtype)
    module.load_state_dict(state, assign=True)
    return module.to(device).eval().requires_grad_(False)


FILES = (SINGLE, "pytorch_model.bin")
"""Files in which most checkpoints keep their tensors."""
