"""Compiled kernels for a CPU in float32: products of few rows, attention of single queries, norms.

`kernels.c` is compiled when the package is installed, where there is a compiler for it; where there is none, or the CPU
is another, `library` is None and torch's own operators do the same.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Attention(ctypes.Structure):
    """`struct attention` of kernels.c."""

    _fields_ = (
        ("q", _pointer),
        ("q_sequence", _long),
        ("q_head", _long),
        ("keys", _pointer),
        ("key_slot", _long),
        ("key_head", _long),
        ("values", _pointer),
        ("value_slot", _long),
        ("value_head", _long),
        ("blocks", _pointer),
        ("blocks_row", _long),
        ("lengths", _pointer),
        ("sequences", _long),
        ("heads", _long),
        ("kv_heads", _long),
        ("dim", _long),
        ("value_dim", _long),
        ("block_size", _long),
        ("window", _long),
        ("scale", _float),
        ("out", _pointer),
    )


class Library(NamedTuple):
    """The compiled functions, and what this machine has of vectors."""

    product: Callable[..., None]
    write: Callable[..., None]
    attend: Callable[..., None]
    norm: Callable[..., None]
    gate: Callable[..., None]
    lanes: int
    """Floats in a vector."""
    panel: int
    """Outputs that lie together in a laid out weight."""


_ARGUMENTS: dict[str, list[Any]] = {
    "product": [_int, _pointer, _long, _long, _pointer, _pointer, _pointer, _long, _int],
    "write": [
        *(_pointer, _long, _long, _pointer, _long, _long),
        *(_pointer, _long, _long, _pointer, _long, _long),
        *(_pointer, _long, _long, _long, _long),
    ],
    "attend": [_int, ctypes.POINTER(Attention), _long, _pointer, _int],
    "norm": [_int, _pointer, _long, _long, _pointer, _float, _pointer, _long, _long, _long, _int],
    "gate": [_int, _pointer, _pointer, _long, _long, _int],
}


@cache
def libraries() -> list[Library]:
    """The kernels for every kind of vectors that this CPU has, the widest first. Empty where they were not compiled."""
    spec = find_spec("segue.kernels._native")
    if spec is None or spec.origin is None:
        return []
    try:
        functions = ctypes.CDLL(spec.origin)  # the OpenMP runtime it asks for is the one that torch has loaded
    except OSError as error:
        logger.warning("compiled kernels are left out: %s", error)
        return []
    calls = {}
    for name, arguments in _ARGUMENTS.items():
        calls[name] = functions[f"segue_{name}"]
        calls[name].argtypes, calls[name].restype = arguments, None
    functions.segue_panel.argtypes = [_int]
    widest = functions.segue_lanes()
    return [Library(**calls, lanes=lanes, panel=functions.segue_panel(lanes)) for lanes in (16, 8) if lanes <= widest]


def library() -> Library | None:
    """The kernels for the widest vectors; None where there are none for this CPU, or they were not compiled."""
    return next(iter(libraries()), None)


def product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int) -> torch.Tensor:
    """x [rows, in], panels [panels, in, panel], bias [panels * panel] → [rows, outputs], float32 on a CPU.

    A row's result does not depend on those beside it. As many threads as torch has.
    """
    compiled = library()
    assert compiled is not None
    rows, inputs = x.shape
    if x.dtype != torch.float32 or panels.shape[1] != inputs:
        raise RuntimeError(f"a product of {x.dtype} {list(x.shape)} with float32 panels {list(panels.shape)}")
    x = x.contiguous()
    y = x.new_empty(rows, outputs)
    compiled.product(
        *(compiled.lanes, x.data_ptr(), rows, inputs, panels.data_ptr(), bias.data_ptr(), y.data_ptr(), outputs),
        torch.get_num_threads(),
    )
    return y
