"""Compiled kernels for a CPU in float32: GEMMs, attention, norms.

`kernels.c` is compiled when the package is installed, if a suitable compiler is found. Without one, or on another CPU,
`library` returns None, torch's own operators do the same, and `missing` says why.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

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


class Experts(ctypes.Structure):
    """`struct experts` of kernels.c."""

    _fields_ = (
        ("x", _pointer),
        ("chosen", _pointer),
        ("shares", _pointer),
        ("both", _pointer),
        ("both_bias", _pointer),
        ("down", _pointer),
        ("down_bias", _pointer),
        ("both_next", _long),
        ("both_bias_next", _long),
        ("down_next", _long),
        ("down_bias_next", _long),
        ("both_kind", _long),
        ("down_kind", _long),
        ("tokens", _long),
        ("hidden", _long),
        ("inner", _long),
        ("each", _long),
        ("experts", _long),
        ("rows", _pointer),
        ("gates", _pointer),
        ("gated", _pointer),
        ("mixed", _pointer),
        ("order", _pointer),
        ("y", _pointer),
    )


class Library(NamedTuple):
    """The compiled functions, and the instruction set to call them with."""

    product: Callable[..., None]
    write: Callable[..., None]
    attend: Callable[..., None]
    full_attention: Callable[..., None]
    norm: Callable[..., None]
    modulate: Callable[..., None]
    turn: Callable[..., None]
    gate: Callable[..., None]
    experts: Callable[..., None]
    draw: Callable[..., None]
    snake: Callable[..., None]
    replay: Callable[..., None]
    number: int
    """Number of the instruction set, the first argument of all of them: `NARROW` to `TILED`."""
    lanes: int
    """Floats in a vector."""
    panel: int
    """Number of outputs per panel of a packed weight."""
    full_scratch: Callable[[int, int], int]
    """Floats of scratch memory per thread of `full_attention`, from the dimensions of keys and of values."""
    product_scratch: Callable[[int, int, int, int], int]
    """Floats of scratch memory for `product`, from instruction set, kind, rows and inputs."""


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
    "experts": [_int, ctypes.POINTER(Experts), _int],
    "draw": [
        *(_int, _pointer, _long, _pointer, _long, _pointer, _long, _float, _pointer, _pointer),
        *(_long, _long, _long, _long, _int),
    ],
    "snake": [_int, _pointer, _long, _long, _pointer, _pointer, _pointer, _long, _long, _long, _int],
    "replay": [_int, _pointer, _long, _int],
}
NARROW, WIDE, WIDE_BYTES, WIDE_PAIRS, TILED = range(5)
"""AVX2; AVX-512; with int8 dot products (VNNI); with bfloat16 dot products (BF16); and with bfloat16 tiles (AMX), which
GEMMs with bfloat16 weights use."""
FLOATS, HALVES, ROUNDED, BYTES, FOURS, EIGHTS, FOURS_BY_FLOATS, EIGHTS_BY_FLOATS = range(8)
"""Weight and activation formats of a GEMM: float32; bfloat16 weights, two per word; the same, with activations rounded
to bfloat16; int8 weights with a scale per output, with activations rounded to int8 with a scale per row; 4 or 8 bits
with a scale and a zero per group of inputs, in one word, or as two floats."""
_VERSION = 13
"""`segue_version` of kernels.c."""
_AGAIN = (
    "install a C compiler (gcc and libc6-dev on Debian and Ubuntu, gcc elsewhere), then Segue again, with "
    "pip install --force-reinstall --no-deps --no-cache-dir"
)


@cache
def libraries() -> list[Library]:
    """The kernels for every instruction set that this CPU has, the best first; empty if `missing` gives a reason."""
    return [] if isinstance(functions := _functions(), str) else _libraries(functions)


def missing() -> str:
    """Why there are no compiled kernels here, and the remedy, if any; empty if there are some."""
    return functions if isinstance(functions := _functions(), str) else ""


@cache
def _functions() -> ctypes.CDLL | str:
    """The loaded library if this CPU can run it, else the reason why not."""
    if platform.machine() != "x86_64":
        return f"they are for x86-64 CPUs, and this one is {platform.machine()}"
    spec = find_spec("segue.kernels.cpu._native")
    if spec is None or spec.origin is None:
        return f"there was no working C compiler when Segue was installed; {_AGAIN}"
    try:
        functions = ctypes.CDLL(spec.origin)  # it shares the OpenMP runtime that torch has loaded
    except OSError as error:
        return f"they cannot be loaded ({error}); {_AGAIN}"
    try:
        version = functions.segue_version()
    except AttributeError:  # the first version had no such function
        version = 1
    if version != _VERSION:
        return f"they are those of another version of Segue; {_AGAIN}"
    if functions.segue_set() < 0:
        return "they are for CPUs with AVX2 and FMA, which this one lacks"
    return functions


def _libraries(functions: ctypes.CDLL) -> list[Library]:
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
    """The kernels for the best instruction set; None if they do not support this CPU, or were not compiled."""
    return next(iter(libraries()), None)


def halves_are_tiled(inputs: int) -> bool:
    """Whether GEMMs with this many inputs and bfloat16 weights use tiles: faster than any other, for any number of
    rows."""
    compiled = library()
    return compiled is not None and compiled.number == TILED and inputs % 32 == 0


def gemm(
    x: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor,
    outputs: int,
    kind: int,
    *,
    gelu: bool = False,
    group: int = 0,
) -> torch.Tensor:
    """GEMM: x [rows, inputs] times `panels` of a kind plus bias [panels * panel] → [rows, outputs], float32 on a CPU;
    `gelu`: apply GELU with the tanh approximation; `group`: inputs that share a scale, for kinds with groups.

    Panels are [panels, in, panel]; for bfloat16 [panels, in / 2, panel]; for int8 [panels, 2 + in / 4, panel], the
    first two rows being the sums' start values and scales; for 4 or 8 bits [panels, rows, panel], as in grouped.h. A
    row's result does not depend on the other rows. Uses as many threads as torch.
    """
    compiled = library()
    assert compiled is not None
    rows, inputs = x.shape
    deep = _rows_of_panel(kind, inputs, group)
    if x.dtype != torch.float32 or panels.shape[1] != deep:
        raise RuntimeError(f"GEMM of {x.dtype} {list(x.shape)} with panels {list(panels.shape)} of kind {kind}")
    x = x.contiguous()
    y = x.new_empty(rows, outputs)
    if not rows:
        return y
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
