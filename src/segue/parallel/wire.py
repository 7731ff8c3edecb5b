"""Messages between the ranks of a replica: msgpack frames over Unix stream sockets; tensors travel as raw bytes."""

from __future__ import annotations

import socket
from functools import cache
from typing import Any

import msgspec
import torch

from segue.messages.errors import StageFailed

_TENSOR = 1
"""Code of the msgpack extension for tensors."""
_LENGTH = 8
"""Bytes of a frame's length."""


def send(end: socket.socket, data: bytes) -> None:
    """Send one frame. Raises `OSError` if the other end is gone."""
    end.sendall(len(data).to_bytes(_LENGTH, "little"))
    end.sendall(data)


def receive(end: socket.socket) -> bytes | None:
    """Wait for one frame; None if the other end is closed."""
    header = _exactly(end, _LENGTH)
    return None if header is None else _exactly(end, int.from_bytes(header, "little"))


def encode(value: Any) -> bytes:
    """Encode plain values, structs, dataclasses and tensors. Raises `StageFailed` for anything else."""
    return _encoder.encode(value)


def decode(data: bytes, kind: Any) -> Any:
    """The inverse of `encode` for values of the type `kind`; tensors come back on the CPU."""
    return _decoder(kind).decode(data)


def dtype_name(dtype: torch.dtype) -> str:
    """The inverse of `dtype_of`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[n] uint8: the elements of a tensor in order, on its device."""
    # a copy with strides of its own: those of a single element can be anything, which `view` refuses
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name like `float32` or `bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_unpacked)


def _exactly(end: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            got = end.recv_into(view)
        except ConnectionResetError:  # closed with frames of ours unread
            return None
        if got == 0:
            return None
        view = view[got:]
    return bytes(data)


def _packed(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise StageFailed(
            f"the payload from upstream holds a {type(value).__name__}; only tensors and plain values can be sent to "
            "the other ranks of a stage"
        )
    raw = bytes_of(value.detach().cpu()).numpy().data
    return msgspec.msgpack.Ext(_TENSOR, _encoder.encode((dtype_name(value.dtype), list(value.shape), raw)))


def _unpacked(code: int, data: memoryview) -> torch.Tensor:
    assert code == _TENSOR, f"unknown msgpack extension {code}"
    name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytearray])
    dtype = dtype_of(name)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
