"""Read weights of bitsandbytes in transformers' format. Activations are not rounded.

8 bits (LLM.int8(), Dettmers et al., 2022): `weight` [outputs, inputs] int8 and `SCB` [outputs], the largest weight
of each output, which 127 represents.

4 bits (QLoRA, Dettmers et al., 2023): `weight` [bytes, 1] uint8, or as many bytes stored as floats, all weights in
sequence, the first of a byte in its upper half; `weight.quant_map` [16], the values of the codes; `weight.absmax`
[blocks], the scale of each block of weights. Scales may be quantised to bytes too: indices of a table
`weight.nested_quant_map` [256], times `weight.nested_absmax` for each block of them, plus an offset. The rest, as JSON
in bytes, is `weight.quant_state.bitsandbytes__nf4` (or fp4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch.nn import functional

from segue.models.shared.checkpoint.packed.weights import (
    Coded,
    Scaled,
    Tensors,
    Unreadable,
    floats_of,
    must_be,
    same,
    taken,
)


class Bitsandbytes8:
    leaves = same("weight", "SCB", "weight_format")
    marks = frozenset({"weight"})

    def __init__(self, written: dict[str, Any], path: Path) -> None:
        pass

    def read(self, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Scaled:
        layout = tensors.get("weight_format")
        if layout is not None and layout.count_nonzero():  # 0: row-major; other layouts were for certain GPUs
            raise Unreadable("weight_format", f"is {layout.tolist()}; only 0 (row-major) is supported")
        held = taken(tensors, "weight", lambda dtype: dtype == torch.int8, "int8", 2)
        largest = floats_of(tensors, "SCB", 1)
        must_be("SCB", largest, (len(held),), f"of {len(held)} outputs")
        return Scaled(held, largest[:, None] / 127, (1, held.shape[1]), rounded=False)


class _State(msgspec.Struct):
    """The JSON entries of the quantisation state."""

    blocksize: int
    shape: list[int]
    nested_blocksize: int = 256
    nested_offset: float = 0.0


_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_KINDS = ("nf4", "fp4")
_STATE = "weight_quant_state_"


class Bitsandbytes4:
    leaves: ClassVar[dict[str, str]] = {
        "weight": "weight",
        **{f"weight_{part}": f"weight.{part}" for part in _PARTS},
        **{f"{_STATE}{kind}": f"weight.quant_state.bitsandbytes__{kind}" for kind in _KINDS},
    }
    marks = frozenset({"weight"})

    def __init__(self, written: dict[str, Any], path: Path) -> None:
        pass

    def read(self, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Coded:
        state = _state(tensors)
        if "weight" not in tensors:
            raise Unreadable("weight", "is not in the checkpoint")
        # bytes, or as many stored as floats (`bnb_4bit_quant_storage`)
        held = tensors["weight"].contiguous().flatten().view(torch.uint8)
        count = state.shape[0] * state.shape[1]
        if len(held) != -(-count // 2):
            raise Unreadable("weight", f"has {len(held)} bytes; those of {state.shape} are {-(-count // 2)}")
        blocks = -(-count // state.blocksize)
        table = floats_of(tensors, "weight_quant_map", 1)
        must_be("weight_quant_map", table, (16,), "of 4 bits")
        held = functional.pad(held, (0, blocks * state.blocksize // 2 - len(held))).view(blocks, -1)
        return Coded(held, table, _scales(tensors, state, blocks), (state.shape[0], state.shape[1]))


def _state(tensors: Tensors) -> _State:
    leaf = next((f"{_STATE}{kind}" for kind in _KINDS if f"{_STATE}{kind}" in tensors), f"{_STATE}nf4")
    written = _bytes(tensors, leaf)
    try:
        state = msgspec.json.decode(bytes(written.flatten().tolist()), type=_State)
    except msgspec.DecodeError as error:
        raise Unreadable(leaf, f"holds no valid JSON: {error}") from error
    if len(state.shape) != 2 or state.blocksize < 2 or state.blocksize % 2 or state.nested_blocksize < 1:
        raise Unreadable(leaf, f"holds {msgspec.json.encode(state).decode()}, which does not describe a layer")
    return state


def _scales(tensors: Tensors, state: _State, blocks: int) -> torch.Tensor:
    """[blocks] float"""
    scale = tensors.get("weight_absmax")
    if scale is None or scale.dtype != torch.uint8:
        scale = floats_of(tensors, "weight_absmax", 1)
    must_be("weight_absmax", scale, (blocks,), f"of {blocks} blocks")
    if scale.dtype != torch.uint8:
        return scale
    table, largest = floats_of(tensors, "weight_nested_quant_map", 1), floats_of(tensors, "weight_nested_absmax", 1)
    must_be("weight_nested_quant_map", table, (256,), "of bytes")
    must_be("weight_nested_absmax", largest, (-(-blocks // state.nested_blocksize),), f"of {blocks} blocks")
    spread = largest.repeat_interleave(state.nested_blocksize)[:blocks]
    return table[scale.int()] * spread + state.nested_offset


def _bytes(tensors: Tensors, leaf: str) -> torch.Tensor:
    if leaf not in tensors:
        raise Unreadable(leaf, "is not in the checkpoint")
    if tensors[leaf].dtype != torch.uint8:
        raise Unreadable(leaf, f"is {str(tensors[leaf].dtype).removeprefix('torch.')}; it must be uint8")
    return tensors[leaf]
