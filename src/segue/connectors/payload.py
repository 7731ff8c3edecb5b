"""Encode a payload as one run of bytes: a msgpack header, then the raw bytes of its tensors. No pickle.

    | magic, header length, total | header (msgpack) | pad | tensor or bytes | pad | tensor or bytes | …
    0                             16                       ↑ every part starts on a multiple of 64 bytes

The header is the payload's tree. Scalars stand for themselves and dicts are maps; everything else is a list that begins
with a tag: `[0, items…]` list, `[1, items…]` tuple, `[2, dtype, shape, offset]` tensor, `[3, offset, length]` bytes,
with offsets counted from the end of the header's padding; `[4, dtype, shape, offset]` is a tensor whose bytes travel
separately, in a region of device memory, with its offset there.

To encode, `measure` the payload, then `Encoded.write_into` a buffer: one memcpy per tensor. `read_from` decodes without
a copy: the tensors are views of the buffer and keep it alive.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from segue.messages.errors import StageFailed

ALIGN = 64
"""Bytes; a cache line, and at least what any dtype or vector instruction requires."""
MAX_DEPTH = 64
"""Maximum nesting of containers; it also stops at a container that holds itself."""

_MAGIC = b"SGP1"
_PREFIX = struct.Struct("<4sIQ")  # magic, bytes of header, bytes of everything
_LIST, _TUPLE, _TENSOR, _BYTES, _APART = range(5)
APART_ALIGN = 256
"""Bytes; the alignment of a device's allocations, which its kernels expect of tensors in a region, too."""
_PLAIN = frozenset({type(None), bool, int, float, str})
_MAX_BYTES = 2**62

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # a quantised tensor has more than its bytes (scale, zero point)
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""Name in the header → dtype, for all dtypes that tensors may have."""
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Item size → the dtype as which a tensor is copied: not every dtype has a copy kernel, and bits must not change."""


class PayloadError(StageFailed):
    """A payload that cannot be sent (`field` is the path in it), or bytes that are not a payload."""


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Encoded:
    """A measured payload, ready to be written."""

    header: bytes
    parts: list[tuple[int, Tensor | bytes]]
    """(offset in the body, contents)"""
    size: int
    """Bytes that `write_into` fills, prefix and padding included."""
    apart: list[tuple[int, Tensor]] = field(default_factory=list)
    """(offset in the region, tensor): tensors that travel separately."""
    apart_size: int = 0
    """Bytes of that region."""

    @property
    def body(self) -> int:
        """Offset of the body."""
        return _aligned(_PREFIX.size + len(self.header))

    def laid_out(self) -> list[tuple[int, Tensor | bytes]]:
        """Return (offset, contents) of all that is written, prefix and header included, by offset."""
        prefix = _PREFIX.pack(_MAGIC, len(self.header), self.size)
        parts = [(self.body + offset, part) for offset, part in self.parts]
        return [(0, prefix + self.header), *parts]

    def write_into(self, buffer: memoryview, *, skip_tensors: bool = False) -> None:
        """Fill the first `size` bytes of a writable buffer; one copy per tensor, from whichever device it is on.

        `skip_tensors` leaves the tensors' bytes as they are, for a producer that then computes into them.
        """
        if len(buffer) < self.size:
            raise PayloadError(f"a payload of {self.size} bytes does not fit a buffer of {len(buffer)}")
        _PREFIX.pack_into(buffer, 0, _MAGIC, len(self.header), self.size)
        buffer[_PREFIX.size : _PREFIX.size + len(self.header)] = self.header
        for offset, part in self.parts:
            if isinstance(part, bytes):
                buffer[self.body + offset : self.body + offset + len(part)] = part
            elif not skip_tensors:
                _copy(part, buffer, self.body + offset)


def _copy(tensor: Tensor, buffer: memoryview, offset: int) -> None:
    source = as_carrier(tensor)
    carrier = source.dtype
    target = torch.frombuffer(buffer, dtype=torch.uint8, count=tensor.numel() * tensor.dtype.itemsize, offset=offset)
    target.view(carrier).view(tensor.shape).copy_(source)


def as_carrier(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as a dtype with a copy kernel, with conjugation and negation resolved."""
    return tensor.detach().resolve_conj().resolve_neg().view(_CARRIER[tensor.dtype.itemsize])


def measure(payload: dict[str, Any], apart: Callable[[Tensor], bool] | None = None) -> Encoded:
    """Lay out a payload; tensors for which `apart` is true get a place in a separate region. Raises `PayloadError`
    naming the path of a value that cannot be sent.

    Allowed types: dict (keys str or int), list, tuple, strided tensors of any dtype except quantised ones, bytes, str,
    int (64 bits), float, bool, None. Subclasses are refused, because they would arrive as another type.
    """
    if type(payload) is not dict:
        raise PayloadError(f"a payload is a dict, not {type(payload).__name__}", field="payload")
    walk = _Layout(apart)
    tree = walk.container(payload, "payload", 0)
    try:
        header = msgspec.msgpack.encode(tree)
    except (OverflowError, UnicodeEncodeError) as error:
        raise _unsendable(payload, "payload", error) from error
    size = _aligned(_PREFIX.size + len(header)) + walk.end
    return Encoded(header, walk.parts, size, walk.apart_parts, walk.apart_end)


@dataclass(slots=True)
class _Layout:
    """Builds the header's tree and assigns offsets in the body to tensors and bytes."""

    apart: Callable[[Tensor], bool] | None
    parts: list[tuple[int, Tensor | bytes]] = field(default_factory=list)
    end: int = 0
    apart_parts: list[tuple[int, Tensor]] = field(default_factory=list)
    apart_end: int = 0

    def place(self, part: Tensor | bytes, size: int) -> int:
        if size == 0:
            return 0
        offset = _aligned(self.end)
        self.parts.append((offset, part))
        self.end = offset + size
        return offset

    def node(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        if type(value) is bytes:
            return [_BYTES, self.place(value, len(value)), len(value)]
        return self.container(value, path, depth)

    def container(self, value: Any, path: str, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise PayloadError(f"{path} is nested deeper than {MAX_DEPTH} containers", field=path)
        kind = type(value)
        if kind is dict:
            tree = {}
            for key, item in value.items():
                if type(key) is not str and type(key) is not int:
                    raise PayloadError(f"{path} has the key {key!r}; a key must be str or int", field=path)
                tree[key] = item if type(item) in _PLAIN else self.node(item, f"{path}[{key!r}]", depth + 1)
            return tree
        if kind is list or kind is tuple:
            items = (
                item if type(item) in _PLAIN else self.node(item, f"{path}[{index}]", depth + 1)
                for index, item in enumerate(value)
            )
            return [_LIST if kind is list else _TUPLE, *items]
        raise PayloadError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}; a payload holds dicts, lists, tuples, tensors, bytes, "
            "str, int, float, bool and None",
            field=path,
        )

    def tensor(self, value: Tensor, path: str) -> Any:
        name = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided or name not in DTYPES:
            raise PayloadError(
                f"{path} is a {value.layout} tensor of {value.dtype}; it must be strided and not quantised", field=path
            )
        size = value.numel() * value.dtype.itemsize
        if size and self.apart is not None and self.apart(value):
            offset = -(-self.apart_end // APART_ALIGN) * APART_ALIGN
            self.apart_parts.append((offset, value))
            self.apart_end = offset + size
            return [_APART, name, list(value.shape), offset]
        return [_TENSOR, name, list(value.shape), self.place(value, size)]


def _unsendable(value: Any, path: str, error: Exception) -> PayloadError:
    """Find the scalar that msgpack cannot encode; a slow walk, made only after the encoder has failed."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not _encodes(key) or not _encodes(item):
                return _unsendable(item if _encodes(key) else key, f"{path}[{key!r}]", error)
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if not _encodes(item):
                return _unsendable(item, f"{path}[{index}]", error)
    right = "fit 64 bits (send a larger one as str)" if isinstance(value, int) else "be valid unicode (send bytes)"
    return PayloadError(f"{path} is {value!r:.80}; it must {right}", field=path)


def _encodes(value: Any) -> bool:
    """Whether msgpack can encode every scalar in `value`; tensors are ignored."""
    try:
        msgspec.msgpack.encode(value, enc_hook=lambda _: None)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


def read_from(buffer: memoryview, region: Tensor | None = None) -> dict[str, Any]:
    """Decode the payload in a writable buffer. Its tensors are views of the buffer and keep it alive; bytes are copies.

    `region`: [bytes] uint8 on any device, aligned to `APART_ALIGN`; tensors that travelled separately are views of it.

    Raises `PayloadError` for any bytes that are not a payload.
    """
    if buffer.readonly:
        raise PayloadError("the buffer is read-only; tensors cannot be views of it")
    if len(buffer) < _PREFIX.size:
        raise PayloadError(f"{len(buffer)} bytes are not a payload; its prefix alone has {_PREFIX.size}")
    magic, header, total = _PREFIX.unpack_from(buffer)
    body = _aligned(_PREFIX.size + header)
    if magic != _MAGIC or total > len(buffer) or body > total:
        raise PayloadError(
            f"not a payload: magic {magic!r}, header of {header} bytes, {total} in all, in a buffer of {len(buffer)}"
        )
    try:
        tree = msgspec.msgpack.decode(buffer[_PREFIX.size : _PREFIX.size + header])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PayloadError(f"the payload's header is not msgpack: {error}") from error
    if type(tree) is not dict:
        raise PayloadError(f"the payload's header holds a {type(tree).__name__}, not a map")
    return _Builder(buffer, body, total, region).build(tree, 0)


@dataclass(slots=True)
class _Builder:
    buffer: memoryview
    body: int
    total: int
    region: Tensor | None

    def build(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if kind in _PLAIN:
            return node
        if depth > MAX_DEPTH:
            raise PayloadError(f"the payload's header is nested deeper than {MAX_DEPTH} containers")
        if kind is dict and all(type(key) is str or type(key) is int for key in node):
            return {key: item if type(item) in _PLAIN else self.build(item, depth + 1) for key, item in node.items()}
        if kind is list and node and type(node[0]) is int:
            match node:
                case [0, *items]:
                    return [item if type(item) in _PLAIN else self.build(item, depth + 1) for item in items]
                case [1, *items]:
                    return tuple(item if type(item) in _PLAIN else self.build(item, depth + 1) for item in items)
                case [2, str(name), list(shape), int(offset)] if all(type(length) is int for length in shape):
                    return self.tensor(name, shape, offset)
                case [4, str(name), list(shape), int(offset)] if all(type(length) is int for length in shape):
                    return self.tensor_apart(name, shape, offset)
                case [3, int(offset), int(length)]:
                    start = self.span(offset, length)
                    return bytes(self.buffer[start : start + length])
        raise PayloadError(f"the payload's header has an invalid node: {node!r:.80}")

    def span(self, offset: int, length: int) -> int:
        start = self.body + offset
        if offset < 0 or length < 0 or start + length > self.total:
            raise PayloadError(f"the payload's header names bytes {offset} to {offset + length}, beyond its end")
        return start

    def tensor(self, name: str, shape: list[int], offset: int) -> Tensor:
        dtype, count = self.kind(name, shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        start = self.span(offset, count)
        if offset % ALIGN:
            raise PayloadError(f"the payload's header puts a tensor at {offset}, not a multiple of {ALIGN}")
        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=count, offset=start).view(dtype).view(shape)

    def tensor_apart(self, name: str, shape: list[int], offset: int) -> Tensor:
        dtype, count = self.kind(name, shape)
        if self.region is None or offset < 0 or offset % APART_ALIGN or offset + count > self.region.numel():
            held = "no bytes" if self.region is None else f"{self.region.numel()} bytes"
            raise PayloadError(
                f"the payload's header puts {count} bytes at {offset} of a separate region, which has {held}"
            )
        return self.region[offset : offset + count].view(dtype).view(shape)

    @staticmethod
    def kind(name: str, shape: list[int]) -> tuple[torch.dtype, int]:
        """Return (dtype, bytes) of a tensor from its name and shape in the header."""
        dtype = DTYPES.get(name)
        if dtype is None:
            raise PayloadError(f"the payload's header names the dtype {name!r}, which this torch does not have")
        if any(length < 0 for length in shape) or len(shape) > MAX_DEPTH:
            raise PayloadError(f"the payload's header names the shape {shape}")
        # strides are products of lengths, with zeros counted as ones; they must fit into 64 bits too
        if math.prod(max(length, 1) for length in shape) * dtype.itemsize > _MAX_BYTES:
            raise PayloadError(f"the payload's header names the shape {shape}, more than can be addressed")
        return dtype, math.prod(shape) * dtype.itemsize
