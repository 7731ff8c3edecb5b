"""What the leader of a diffusion replica tells its followers, over the sockets of `segue.parallel.orders`.

Followers hear of every request what the leader's adapter hears, so they hold the same samples; only latents follow
each call, by broadcast.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

_TENSOR = 1
"""Code of the extension."""


class Begin(msgspec.Struct, tag=True, array_like=True):
    """`begin`."""

    request: msgspec.Raw
    """A `StageRequest`."""


class Feed(msgspec.Struct, tag=True, array_like=True):
    """`feed`."""

    request_id: str
    upstream: str
    payload: dict[str, Any]
    final: bool


class End(msgspec.Struct, tag=True, array_like=True):
    """`end`."""

    request_id: str


class Predict(msgspec.Struct, tag=True, array_like=True):
    """A call of the network: each rank computes the rows that are its own. The latents of all rows follow."""

    rows: list[tuple[str, int, int, int]]
    """(request, output, branch, step)."""
    behind_first: bool
    """`predict_behind_first`."""


RowOrder = Begin | Feed | End | Predict


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        name = str(whole.dtype).removeprefix("torch.")
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((name, list(whole.shape), raw)))
    raise NotImplementedError(f"a payload with a {type(value).__name__}")


def _unpacked(code: int, data: memoryview) -> Any:
    assert code == _TENSOR, f"an extension {code}"
    name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
_decoder = msgspec.msgpack.Decoder(RowOrder, ext_hook=_unpacked)


def encode_row_order(order: RowOrder) -> bytes:
    """As `Crew.send` takes it."""
    return _encoder.encode(order)


def decode_row_order(data: bytes) -> RowOrder:
    """The other way round."""
    return _decoder.decode(data)
