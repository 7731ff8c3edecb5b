"""Orders from the leader of a replica to its followers: one per call of the model or of a store.

Orders travel over a Unix stream socket per follower; their tensors follow by broadcast. These orders are not answered,
because the collectives inside the model keep the ranks together.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Container, Sequence

import msgspec
import numpy as np
import torch

from segue.kernels.attention.paged_step import Part
from segue.kernels.kv.layout import KVLayout
from segue.kernels.kv.states import Stretch

_LENGTH = 4


class OpenStore(msgspec.Struct, tag=True, array_like=True):
    """Create a KV store with the number `store`."""

    store: int
    layout: KVLayout
    num_blocks: int
    block_size: int
    dtype: str
    stored: str | None
    gathers: bool
    """No backend: blocks are gathered (`TorchAttention`)."""


class CloseStore(msgspec.Struct, tag=True, array_like=True):
    """Close a KV store that is no longer used."""

    store: int


class CopyBlocks(msgspec.Struct, tag=True, array_like=True):
    """`KVStore.copy`."""

    store: int
    pairs: list[tuple[int, int]]


class ScrubBlocks(msgspec.Struct, tag=True, array_like=True):
    """`KVStore.scrub`."""

    store: int
    blocks: list[int]


class OpenStates(msgspec.Struct, tag=True, array_like=True):
    """Create a state store with this many slots for each rank's layers, with the number `store`."""

    store: int
    slots: int


class CloseStates(msgspec.Struct, tag=True, array_like=True):
    """Close a state store that is no longer used."""

    store: int


class CopyStates(msgspec.Struct, tag=True, array_like=True):
    """`StateStore.copy`."""

    store: int
    pairs: list[tuple[int, int]]


class Embed(msgspec.Struct, tag=True, array_like=True):
    """`embed`; token ids [count], or rows of codes [count, groups], follow."""

    count: int
    groups: int = 0
    """0: token ids."""


class LoadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Load a LoRA adapter that the leader has loaded."""

    name: str
    directory: str


class UnloadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Unload an adapter: no further request will name it."""

    name: str


class ForgetAdapter(msgspec.Struct, tag=True, array_like=True):
    """Drop an adapter that no sequence uses or will use."""

    identity: bytes


class Sequences(msgspec.Struct, array_like=True):
    """The parts of a step for one group of layers."""

    spans: list[tuple[int, int]]
    blocks: list[bytes]
    """int32, per part: its blocks up to its end."""
    bidirectional: list[list[tuple[int, int]]]
    """`Part.bidirectional` of each."""

    @classmethod
    def of(cls, parts: Sequence[Part], block_size: int) -> Sequences:
        """Pack parts, with only the blocks that the step reads."""
        tables = [np.asarray(part.blocks[: -(-part.stop // block_size)], np.int32).tobytes() for part in parts]
        return cls([(part.start, part.stop) for part in parts], tables, [list(part.bidirectional) for part in parts])

    def parts(self) -> list[Part]:
        """Unpack the parts."""
        return [
            Part(np.frombuffer(table, np.int32).tolist(), start, stop, bidirectional)
            for table, (start, stop), bidirectional in zip(self.blocks, self.spans, self.bidirectional, strict=True)
        ]


class Forward(msgspec.Struct, tag=True, array_like=True):
    """`forward`; ids and positions [1 + axes, tokens] follow, then the embeddings [tokens, width], then `others`."""

    tokens: int
    axes: int
    embeds: tuple[int, str] | None
    """(width, dtype); None: those of the last `Embed`."""
    spans: list[tuple[int, int]]
    """Per request: the range of its sequence in this batch."""
    adapters: list[bytes | None]
    """Per request: the identity of its LoRA adapter."""
    store: int | None
    """None: use the library's own masks."""
    groups: list[Sequences]
    invariant: bool = False
    """Run in tiles of 16 rows (`segue.kernels.attention.invariant_attention`)."""
    states: tuple[int, list[Stretch]] | None = None
    """(state store, stretches for `state_step`), for a decoder with state."""
    others: list[tuple[str, tuple[int, ...], str]] = []
    """(name, shape, dtype) of what a `ReadsOthers` reads."""


class Logits(msgspec.Struct, tag=True, array_like=True):
    """`logits`; hidden states [rows, width] follow."""

    rows: int
    hidden: tuple[int, str] | None
    """(width, dtype); None: the result of the last `Forward`."""


class Advance(msgspec.Struct, tag=True, array_like=True):
    """`advance`; hidden states [rows, width], codes 0 and greedy [2, rows], and numbers [rows, groups - 1] follow."""

    rows: int
    hidden: tuple[int, str]
    """(width, dtype)"""


Calls = (
    OpenStore
    | CloseStore
    | CopyBlocks
    | ScrubBlocks
    | OpenStates
    | CloseStates
    | CopyStates
    | Embed
    | Forward
    | Logits
    | Advance
)
Order = Calls | LoadAdapter | UnloadAdapter | ForgetAdapter

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Order)


class Crew:
    """The leader's ends of the sockets to its followers."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)

    def tell(self, order: Order) -> None:
        """Send to every follower. Raises `OSError` if one is gone."""
        self.send(_encoder.encode(order))

    def send(self, data: bytes) -> None:
        """Send an encoded order of another kind. Raises `OSError` if a follower is gone."""
        for end in self._sockets:
            answer(end, data)

    def next_answer(self, answered: Container[int], seconds: float | None) -> tuple[int, bytes]:
        """(follower number from 0, data) of the next `answer` from a follower that is not in `answered`. Raises
        `OSError` if one of them is gone, or none answers within `seconds`."""
        poll = select.poll()
        waited = {end.fileno(): number for number, end in enumerate(self._sockets) if number not in answered}
        for descriptor in waited:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise TimeoutError(f"no answer from followers {sorted(waited.values())} within {seconds} s")
        number = min(waited[descriptor] for descriptor, _ in ready)
        data = received(self._sockets[number])
        if data is None:
            raise ConnectionError(f"follower {number} has closed its end")
        return number, data

    def close(self) -> None:
        """Close the sockets, which ends the followers."""
        for end in self._sockets:
            end.close()


def answer(end: socket.socket, data: bytes) -> None:
    """Send to the other end. Raises `OSError` if it is gone."""
    end.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def receive(end: socket.socket) -> Order | None:
    """The next order; None if the leader has closed its end."""
    data = received(end)
    return None if data is None else _decoder.decode(data)


def received(end: socket.socket) -> bytes | None:
    """The next order, encoded; None if the leader has closed its end."""
    header = _exactly(end, _LENGTH)
    return None if header is None else _exactly(end, int.from_bytes(header, "little"))


def _exactly(end: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = end.recv_into(view)
        if got == 0:
            return None
        view = view[got:]
    return bytes(data)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype: `float32`, `bfloat16`, …"""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
