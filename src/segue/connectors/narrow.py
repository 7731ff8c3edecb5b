"""Send float32 tensors as bfloat16: half the bytes, each value off by at most 2⁻⁸ of itself (0.4%).

Optional reading: only edges whose deployment asks for it are narrowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.connectors.base import Payload
from segue.connectors.payload import PayloadError

Path = tuple[Any, ...]


def narrowed(payload: Payload) -> Payload:
    """Return what travels: the payload with bfloat16 for float32, and where to turn it back."""
    paths: list[Path] = []
    return {"payload": _narrow(payload, (), paths), "float32": paths}


def _narrow(value: Any, path: Path, paths: list[Path]) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        paths.append(path)
        return value.to(torch.bfloat16)
    if type(value) is dict:
        return {key: _narrow(item, (*path, key), paths) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_narrow(item, (*path, index), paths) for index, item in enumerate(value))
    return value


def upcast(sent: Payload) -> Payload:
    """Return the payload of `narrowed`, in float32 again. Raises `PayloadError` for anything else."""
    match sent:
        case {"payload": dict(payload), "float32": list(paths)}:
            try:
                return dict(_widen(payload, (), set(paths)))
            except TypeError as error:  # a path of something else than keys
                raise PayloadError("the list of float32 tensors is broken") from error
    raise PayloadError("the payload was to come as bfloat16, but has another form")


def _widen(value: Any, path: Path, paths: set[Path]) -> Any:
    if isinstance(value, Tensor):
        return value.float() if path in paths else value
    if type(value) is dict:
        return {key: _widen(item, (*path, key), paths) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_widen(item, (*path, index), paths) for index, item in enumerate(value))
    return value
