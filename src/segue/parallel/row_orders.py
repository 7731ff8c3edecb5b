"""What the leader of a diffusion replica tells its followers, over the sockets of `segue.parallel.orders`.

Followers hear of every request what the leader's adapter hears, so they hold the same samples; only latents follow
each call, by broadcast. A call goes so:

    Predict                      rows are named
    ◀ Fared, Go ▶                where the network is divided: all ranks have the memory, or there is no Go
    latents, by broadcast        each rank computes its part
    ◀ Fared                      how that went
    Gather ▶                     where branches are divided: predictions meet
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from segue.messages.errors import StageFailed
from segue.parallel.orders import LoadAdapter, UnloadAdapter, dtype_of

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


class WarmUp(msgspec.Struct, tag=True, array_like=True):
    """`warm_up`."""


class Trial(msgspec.Struct, tag=True, array_like=True):
    """The next sample of `trials` may be named in calls."""


class Predict(msgspec.Struct, tag=True, array_like=True):
    """A call of the network: each rank computes the rows that are its own, or its part of them."""

    rows: list[tuple[str, int, int, int]]
    """(request, output, branch, step)."""
    behind_first: bool
    """`predict_behind_first`."""
    shape: list[int]
    """Of the latents, [rows, …]."""
    dtype: str


class Go(msgspec.Struct, tag=True, array_like=True):
    """Every rank has the memory for the call that was named last."""


class Gather(msgspec.Struct, tag=True, array_like=True):
    """Every rank has computed its rows of that call."""


RowOrder = Begin | Feed | End | WarmUp | Trial | Predict | Go | Gather | LoadAdapter | UnloadAdapter


class Fared(msgspec.Struct, array_like=True):
    """What a rank says of a call, before or behind it."""

    kind: str = ""
    """Class of what it failed with; empty where it did not."""
    message: str = ""
    field: str | None = None
    no_memory: bool = False

    @property
    def failure(self) -> str:
        """For people."""
        return f"{self.kind}: {self.message}" if self.kind else "nothing failed"


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        name = str(whole.dtype).removeprefix("torch.")
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((name, list(whole.shape), raw)))
    raise StageFailed(
        f"what came from upstream holds a {type(value).__name__}; only tensors and plain values can be sent to the "
        "other ranks of a stage"
    )


def _unpacked(code: int, data: memoryview) -> Any:
    assert code == _TENSOR, f"an extension {code}"
    name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
    dtype = dtype_of(name)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
_decoder = msgspec.msgpack.Decoder(RowOrder, ext_hook=_unpacked)
_answers = msgspec.msgpack.Decoder(Fared)


def encode_row_order(order: RowOrder) -> bytes:
    """As `Crew.send` takes it."""
    return _encoder.encode(order)


def decode_row_order(data: bytes) -> RowOrder:
    """The other way round."""
    return _decoder.decode(data)


def encode_fared(answer: Fared) -> bytes:
    """As `answer` of `segue.parallel.orders` takes it."""
    return _encoder.encode(answer)


def decode_fared(data: bytes) -> Fared:
    """The other way round."""
    return _answers.decode(data)
