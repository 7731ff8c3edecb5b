"""Pack a modular pipeline's state for the next stage: the entries that later blocks read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from segue.engines.contract import Payload
from segue.messages.errors import StageFailed
from segue.models.images.generic_pipeline.library import PipelineState
from segue.parallel.wire import dtype_of

_PLAIN = (type(None), bool, int, float, str)


def pack(state: PipelineState, names: frozenset[str], groups: frozenset[str]) -> Payload:
    """`{"values": {name: [kind, value]}, "groups": {group: [name, …]}}`: the state's values of these names and of these
    groups (`kwargs_type` of diffusers), except None. Raises `StageFailed` with the name of a value that cannot be
    sent."""
    sent = {group: [*dict.fromkeys(state.kwargs_mapping.get(group, []))] for group in sorted(groups)}
    wanted = names.union(*sent.values())
    values = {
        name: _packed(name, value) for name, value in state.values.items() if name in wanted and value is not None
    }
    return {"values": values, "groups": {group: found for group, found in sent.items() if found}}


def unpack(payload: Payload, state: PipelineState, device: torch.device) -> None:
    """Put the result of `pack` into a state, tensors on `device`."""
    groups: Mapping[str, list[str]] = payload["groups"]
    for name, (kind, value) in payload["values"].items():
        made = _unpacked(kind, value, device)
        state.set(name, made)
        for group, members in groups.items():
            if name in members:
                state.set(name, made, group)


def _packed(name: str, value: Any) -> list[Any]:
    if isinstance(value, torch.Generator):
        return ["generator", value.get_state()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, np.ndarray):
        return ["array", torch.from_numpy(value)]
    if isinstance(value, tuple):
        return ["tuple", [_packed(name, one) for one in value]]
    if isinstance(value, list):
        return ["list", [_packed(name, one) for one in value]]
    if isinstance(value, dict):
        return ["dict", {key: _packed(name, one) for key, one in value.items()}]
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return ["as it is", value]
    raise StageFailed(f"the blocks left {name}, a {type(value).__name__}, which cannot be sent to another stage")


def _unpacked(kind: str, value: Any, device: torch.device) -> Any:
    match kind:
        case "generator":
            generator = torch.Generator()
            generator.set_state(value.cpu())
            return generator
        case "dtype":
            return dtype_of(value)
        case "array":
            return value.cpu().numpy()
        case "tuple":
            return tuple(_unpacked(one[0], one[1], device) for one in value)
        case "list":
            return [_unpacked(one[0], one[1], device) for one in value]
        case "dict":
            return {key: _unpacked(one[0], one[1], device) for key, one in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value
