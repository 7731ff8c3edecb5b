"""Compiled kernels for a CPU in float32: products, attention, norms.

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


class Call(ctypes.Structure):
    """`struct call` of kernels.c."""

    _fields_ = (("kind", _int), ("number", _float), ("of", _long * 22))


class FullAttention(ctypes.Structure):
    """`struct full_attention` of kernels.c."""

    _fields_ = (
        ("q", _pointer),
        ("q_sequence", _long),
        ("q_head", _long),
        ("q_token", _long),
        ("keys", _pointer),
        ("key_sequence", _long),
        ("key_head", _long),
        ("key_token", _long),
        ("values", _pointer),
        ("value_sequence", _long),
        ("value_head", _long),
        ("value_token", _long),
        ("blocks", _pointer),
        ("blocks_row", _long),
        ("block_size", _long),
        ("seen", _pointer),
        ("seen_row", _long),
        ("spans", _pointer),
        ("sequences", _long),
        ("heads", _long),
        ("kv_heads", _long),
        ("queries", _long),
        ("tokens", _long),
        ("dim", _long),
        ("value_dim", _long),
        ("scale", _float),
        ("out", _pointer),
        ("out_sequence", _long),
        ("out_head", _long),
        ("out_token", _long),
    )


class Library(NamedTuple):
    """The compiled functions, and the instruction set that they are called for."""

    product: Callable[..., None]
    write: Callable[..., None]
    attend: Callable[..., None]
    full_attention: Callable[..., None]
    norm: Callable[..., None]
    modulate: Callable[..., None]
    turn: Callable[..., None]
    gate: Callable[..., None]
    replay: Callable[..., None]
    number: int
    """Of the instruction set, the first argument of all of them: `NARROW` to `TILED`."""
    lanes: int
    """Floats in a vector."""
    panel: int
    """Outputs that lie together in a laid out weight."""
    full_scratch: Callable[[int, int], int]
    """Floats that each thread of `full_attention` needs, by the dimensions of keys and of values."""
    product_scratch: Callable[[int, int, int, int], int]
    """Floats that `product` needs besides, by set, kind, rows and inputs."""


_ARGUMENTS: dict[str, list[Any]] = {
    "product": [_int, _pointer, _long, _long, _pointer, _int, _pointer, _pointer, _long, _int, _pointer, _long, _int],
    "write": [
        *(_pointer, _long, _long, _pointer, _long, _long),
        *(_pointer, _long, _long, _pointer, _long, _long),
        *(_pointer, _long, _long, _long, _long),
    ],
    "attend": [_int, ctypes.POINTER(Attention), _long, _pointer, _int],
    "full_attention": [_int, ctypes.POINTER(FullAttention), _pointer, _int],
    "norm": [_int, _pointer, _long, _long, _pointer, _float, _pointer, _long, _long, _long, _int],
    "modulate": [_int, _pointer, _pointer, _pointer, _long, _float, _pointer, _long, _long, _long, _int],
    "turn": [_int, _pointer, _long, _long, _pointer, _float, _pointer, _long, _long, _long, _long, _int],
    "gate": [_int, _pointer, _pointer, _long, _long, _int],
    "replay": [_int, _pointer, _long, _int],
}
NARROW, WIDE, WIDE_BYTES, WIDE_PAIRS, TILED = range(5)
"""AVX2; AVX-512; with sums of products of bytes (VNNI); with those of pairs of bfloat16 (BF16); and with tiles of them
(AMX), of which products with weights of halves are made."""
FLOATS, HALVES, ROUNDED, BYTES, FOURS, EIGHTS, FOURS_BY_FLOATS, EIGHTS_BY_FLOATS = range(8)
"""What the weights of a product are, and what becomes of its activations: float32; bfloat16, two to a word; the same,
with activations rounded to bfloat16; bytes with a scale per output, with activations rounded to bytes with a scale per
row; 4 or 8 bits with a scale and a zero per group of inputs, in one word, or by two floats."""
_VERSION = 11
"""`segue_version` of kernels.c."""


@cache
def libraries() -> list[Library]:
    """The kernels for every instruction set that this CPU has, the best first. Empty where they were not compiled."""
    spec = find_spec("segue.kernels._native")
    if spec is None or spec.origin is None:
        return []
    try:
        functions = ctypes.CDLL(spec.origin)  # the OpenMP runtime it asks for is the one that torch has loaded
    except OSError as error:
        logger.warning("compiled kernels are left out: %s", error)
        return []
    try:
        version = functions.segue_version()
    except AttributeError:  # the first ones said none
        version = 1
    if version != _VERSION:
        logger.warning("compiled kernels are left out: they are those of another version; install segue again")
        return []
    calls = {}
    for name, arguments in _ARGUMENTS.items():
        calls[name] = functions[f"segue_{name}"]
        calls[name].argtypes, calls[name].restype = arguments, None
    functions.segue_panel.argtypes = [_int]
    full_scratch, product_scratch = functions.segue_full_scratch, functions.segue_product_scratch
    full_scratch.argtypes, full_scratch.restype = [_long, _long], _long
    product_scratch.argtypes, product_scratch.restype = [_int, _int, _long, _long], _long
    last = functions.segue_set()
    return [
        Library(
            **calls,
            number=number,
            lanes=8 if number == NARROW else 16,
            panel=functions.segue_panel(number),
            full_scratch=full_scratch,
            product_scratch=product_scratch,
        )
        for number in range(last, -1, -1)
    ]


def library() -> Library | None:
    """The kernels for the best instruction set; None where there are none for this CPU, or they were not compiled."""
    return next(iter(libraries()), None)


def halves_are_tiled(inputs: int) -> bool:
    """Whether products of so many inputs with weights of halves are made of tiles: quicker than any other, for whatever
    number of rows."""
    compiled = library()
    return compiled is not None and compiled.number == TILED and inputs % 32 == 0


def product(
    x: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor,
    outputs: int,
    kind: int,
    *,
    gelu: bool = False,
    group: int = 0,
) -> torch.Tensor:
    """x [rows, inputs] times `panels` of a kind plus bias [panels * panel] → [rows, outputs], float32 on a CPU; `gelu`:
    of that, its approximation with tanh; `group`: inputs that share a scale, of the kinds that have such.

    Panels are [panels, in, panel]; of halves [panels, in / 2, panel]; of bytes [panels, 2 + in / 4, panel], the first
    two rows being what sums start with and scales; of 4 or 8 bits [panels, rows, panel], as grouped.h says. A row's
    result does not depend on those beside it. As many threads as torch has.
    """
    compiled = library()
    assert compiled is not None
    rows, inputs = x.shape
    deep = _rows_of_panel(kind, inputs, group)
    if x.dtype != torch.float32 or panels.shape[1] != deep:
        raise RuntimeError(f"a product of {x.dtype} {list(x.shape)} with panels {list(panels.shape)} of kind {kind}")
    x = x.contiguous()
    y = x.new_empty(rows, outputs)
    scratch = None
    if kind in (ROUNDED, BYTES):
        scratch = x.new_empty(compiled.product_scratch(compiled.number, kind, rows, inputs))
    compiled.product(
        *(compiled.number, x.data_ptr(), rows, inputs, panels.data_ptr(), kind, bias.data_ptr(), y.data_ptr()),
        *(outputs, gelu, 0 if scratch is None else scratch.data_ptr(), group, torch.get_num_threads()),
    )
    return y


def _rows_of_panel(kind: int, inputs: int, group: int) -> float:
    if kind >= FOURS:
        by_floats = kind in (FOURS_BY_FLOATS, EIGHTS_BY_FLOATS)
        return inputs / (8 if kind in (FOURS, FOURS_BY_FLOATS) else 4) + inputs / group * (2 if by_floats else 1)
    return inputs if kind == FLOATS else inputs / 4 + 2 if kind == BYTES else inputs / 2
