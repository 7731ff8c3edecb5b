"""What the leader of a replica tells its followers: one order per call of the model or of a store.

Orders travel over a Unix stream socket per follower; tensors that go with them follow by broadcast. None of these is
answered: the collectives inside the model keep the ranks together.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Container, Sequence

import msgspec
import numpy as np
import torch

from segue.kernels.kv_layout import KVLayout
from segue.kernels.part import Part
from segue.kernels.state_store import Stretch

_LENGTH = 4


class OpenStore(msgspec.Struct, tag=True, array_like=True):
    """Make a KV store; it is called `store` from now on."""

    store: int
    layout: KVLayout
    num_blocks: int
    block_size: int
    dtype: str
    stored: str | None
    gathers: bool
    """No backend: blocks are gathered (`TorchAttention`)."""


class CloseStore(msgspec.Struct, tag=True, array_like=True):
    """Nobody will use it again."""

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
    """Make a state store of so many slots, of what each rank's layers keep; it is called `store` from now on."""

    store: int
    slots: int


class CloseStates(msgspec.Struct, tag=True, array_like=True):
    """Nobody will use it again."""

    store: int


class CopyStates(msgspec.Struct, tag=True, array_like=True):
    """`StateStore.copy`."""

    store: int
    pairs: list[tuple[int, int]]


class Embed(msgspec.Struct, tag=True, array_like=True):
    """`embed`; token ids [count] follow."""

    count: int


class LoadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Have one more LoRA adapter; the leader has it already."""

    name: str
    directory: str


class UnloadAdapter(msgspec.Struct, tag=True, array_like=True):
    """No further request will name it."""

    name: str


class ForgetAdapter(msgspec.Struct, tag=True, array_like=True):
    """No sequence has it any more, nor will have."""

    identity: bytes


class Sequences(msgspec.Struct, array_like=True):
    """The parts of a step, as one group of layers sees them."""

    spans: list[tuple[int, int]]
    blocks: list[bytes]
    """int32, those up to the end of each part."""
    mutual: list[list[tuple[int, int]]]
    """`Part.mutual` of each."""

    @classmethod
    def of(cls, parts: Sequence[Part], block_size: int) -> Sequences:
        """Only what a step reads of the tables."""
        tables = [np.asarray(part.blocks[: -(-part.stop // block_size)], np.int32).tobytes() for part in parts]
        return cls([(part.start, part.stop) for part in parts], tables, [list(part.mutual) for part in parts])

    def parts(self) -> list[Part]:
        """The parts again."""
        return [
            Part(np.frombuffer(table, np.int32).tolist(), start, stop, mutual)
            for table, (start, stop), mutual in zip(self.blocks, self.spans, self.mutual, strict=True)
        ]


class Forward(msgspec.Struct, tag=True, array_like=True):
    """`forward`; ids and positions [1 + axes, tokens] follow, then the embeddings [tokens, width]."""

    tokens: int
    axes: int
    embeds: tuple[int, str] | None
    """(width, dtype); None: those of the last `Embed`."""
    spans: list[tuple[int, int]]
    """Per request: the range of its sequence."""
    adapters: list[bytes | None]
    """Per request: the identity of its LoRA adapter."""
    store: int | None
    """None: under the library's own masks."""
    groups: list[Sequences]
    invariant: bool = False
    """In tiles of 16 rows (`segue.kernels.invariant_attention`)."""
    states: tuple[int, list[Stretch]] | None = None
    """The state store and what `state_step` plans for, of a decoder that keeps states."""


class Logits(msgspec.Struct, tag=True, array_like=True):
    """`logits`; hidden states [rows, width] follow."""

    rows: int
    hidden: tuple[int, str] | None
    """(width, dtype); None: what the last `Forward` gave."""


Calls = (
    OpenStore | CloseStore | CopyBlocks | ScrubBlocks | OpenStates | CloseStates | CopyStates | Embed | Forward | Logits
)
Order = Calls | LoadAdapter | UnloadAdapter | ForgetAdapter

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Order)


class Crew:
    """The leader's ends of the sockets to its followers."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)

    def tell(self, order: Order) -> None:
        """Send to every follower. Raises `OSError` where one is gone."""
        self.send(_encoder.encode(order))

    def send(self, data: bytes) -> None:
        """An order of another kind, encoded. Raises `OSError` where a follower is gone."""
        for end in self._sockets:
            answer(end, data)

    def next_answer(self, heard: Container[int], seconds: float | None) -> tuple[int, bytes]:
        """The number of the follower, from 0, that is the next to say something by `answer`, but those that were
        `heard`, and what. Raises `OSError` where one of them is gone, or all say nothing for so long."""
        poll = select.poll()
        waited = {end.fileno(): number for number, end in enumerate(self._sockets) if number not in heard}
        for descriptor in waited:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise TimeoutError(f"nothing was heard of followers {sorted(waited.values())} for {seconds} s")
        number = min(waited[descriptor] for descriptor, _ in ready)
        data = received(self._sockets[number])
        if data is None:
            raise ConnectionError(f"follower {number} has closed its end")
        return number, data

    def close(self) -> None:
        """The followers end."""
        for end in self._sockets:
            end.close()


def answer(end: socket.socket, data: bytes) -> None:
    """Send to the other end. Raises `OSError` where it is gone."""
    end.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def receive(end: socket.socket) -> Order | None:
    """The next order; None when the leader has closed its end."""
    data = received(end)
    return None if data is None else _decoder.decode(data)


def received(end: socket.socket) -> bytes | None:
    """The next order as it was encoded; None when the leader has closed its end."""
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
    """`float32`, `bfloat16`, …"""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The other way round."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
