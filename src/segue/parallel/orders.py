"""The sockets from the leader of a replica of denoisers to its followers, which `row_orders` travel over."""

from __future__ import annotations

import select
import socket
from collections.abc import Container, Sequence

import msgspec
import torch

_LENGTH = 4


class LoadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Load a LoRA adapter that the leader has loaded."""

    name: str
    directory: str


class UnloadAdapter(msgspec.Struct, tag=True, array_like=True):
    """Unload an adapter: no further request will name it."""

    name: str


class Crew:
    """The leader's ends of the sockets to its followers."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list(sockets)

    def send(self, data: bytes) -> None:
        """Send an encoded order to every follower. Raises `OSError` if a follower is gone."""
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
