"""Orders from the leader of a diffusion replica to its followers, over the sockets of `segue.parallel.orders`.

Followers receive the same inputs of every request as the leader's stage model, so they hold the same samples; only
latents are broadcast in each call. The messages of a call are:

    Predict                        names the rows
    ◀ CallStatus, Go ▶             if the network is divided: Go is sent only if all ranks have the memory
    latents, by broadcast          each rank computes its part
    ◀ CallStatus                   the result of each rank
    Gather ▶                       if branches are divided: collects the predictions
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from segue.messages.errors import StageFailed
from segue.parallel.orders import LoadAdapter, UnloadAdapter
from segue.parallel.wire import dtype_of

_TENSOR = 1
"""Code of the msgpack extension for tensors."""


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
    """Prepare the next sample of `trials`, which calls may then name."""


class Predict(msgspec.Struct, tag=True, array_like=True):
    """A call of the network: each rank computes its own rows, or its part of them."""

    rows: list[tuple[str, int, int, int]]
    """(request, output, branch, step)."""
    behind_first: bool
    """`predict_behind_first`."""
    shape: list[int]
    """Shape of the latents, [rows, …]."""
    dtype: str


class Go(msgspec.Struct, tag=True, array_like=True):
    """Every rank has the memory for the call of the last `Predict`."""


class Gather(msgspec.Struct, tag=True, array_like=True):
    """Every rank has computed its rows of that call."""


RowOrder = Begin | Feed | End | WarmUp | Trial | Predict | Go | Gather | LoadAdapter | UnloadAdapter


class CallStatus(msgspec.Struct, array_like=True):
    """A rank's status of a call, before or after it."""

    kind: str = ""
    """Class of its error; empty if there was none."""
    message: str = ""
    field: str | None = None
    no_memory: bool = False

    @property
    def failure(self) -> str:
        """A readable description."""
        return f"{self.kind}: {self.message}" if self.kind else "nothing failed"


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        name = str(whole.dtype).removeprefix("torch.")
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((name, list(whole.shape), raw)))
    raise StageFailed(
        f"the payload from upstream holds a {type(value).__name__}; only tensors and plain values can be sent to the "
        "other ranks of a stage"
    )


def _unpacked(code: int, data: memoryview) -> Any:
    assert code == _TENSOR, f"unknown msgpack extension {code}"
    name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
    dtype = dtype_of(name)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
_decoder = msgspec.msgpack.Decoder(RowOrder, ext_hook=_unpacked)
_answers = msgspec.msgpack.Decoder(CallStatus)


def encode_row_order(order: RowOrder) -> bytes:
    """Encode for `Crew.send`."""
    return _encoder.encode(order)


def decode_row_order(data: bytes) -> RowOrder:
    """The inverse of `encode_row_order`."""
    return _decoder.decode(data)


def encode_status(answer: CallStatus) -> bytes:
    """Encode for `answer` of `segue.parallel.orders`."""
    return _encoder.encode(answer)


def decode_status(data: bytes) -> CallStatus:
    """The inverse of `encode_status`."""
    return _answers.decode(data)
