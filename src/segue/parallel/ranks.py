"""Keeps the ranks of a replica in step. Each runs the same engine on the same events; rank 0 alone decides.

    rank 0   inbox ─▶ event ──────▶ engine ── same(decision) ─▶ forward ── agree(draws) ─▶ outbox
                        │ frames                  │ frames          ║ collectives ║
    rank 1              ╰─────────▶ engine ── same(decision) ─▶ forward ── agree(draws) ─▶ nothing

An engine is deterministic but for three things, and rank 0's value of each is everyone's:

- what depends on time or on other threads (`same`): the scheduler's decision, drafts, which grammars have compiled. It
  goes through the same socket as the events, so that all ranks read it at the same place.
- results of floating point that decide what follows (`agree`): drawn tokens. All ranks draw, because the state of a
  draw is the engine's, and then take what rank 0 has drawn. Logits that were gathered are equal in every bit, but those
  of a head that is not divided depend on each rank's own sums, of which no backend promises that they are equal.
- errors on one rank alone. Its engine is at another place then, so `ReplicaBroken` ends it, and thereby all of them.

Anything else that differs is a bug. Every so often the ranks compare their states (`compare`), so that one ends the
replica instead of spoiling answers; its requests go on elsewhere, as after the death of any worker.
"""

from __future__ import annotations

import hashlib
import select
import socket
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import torch

from segue.messages.errors import shown
from segue.parallel.group import Group, ReplicaBroken
from segue.parallel.wire import bytes_of, decode, encode, receive, send

T = TypeVar("T")


class Ranks:
    """One rank's link to the others. Without a group it is alone, and every call is free."""

    def __init__(self, group: Group | None = None, ends: Sequence[socket.socket] = ()) -> None:
        """`ends`: of rank 0, one socket to each other rank; of others, the one to rank 0."""
        assert len(ends) == (0 if group is None else group.size - 1 if group.rank == 0 else 1)
        self.group = group
        """The collectives of all ranks."""
        self._ends = list(ends)

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.group is None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.group is None or self.group.rank == 0

    def same(self, make: Callable[[], T], kind: type[T]) -> T:
        """Return rank 0's value, which only rank 0 makes. `kind`: its type, for decoding. Raises `ReplicaBroken`."""
        if self.alone:
            return make()
        if self.first:
            data = encode(make())
            self.tell(data)
        else:
            data = self._expect()
        value: T = decode(data, kind)
        return value

    def every(
        self,
        mine: T,
        kind: Any,
        patience: Callable[[Mapping[int, T]], float | None] = lambda known: None,
        own: float | None = None,
    ) -> list[T]:
        """Return the values of all ranks, rank by rank, on each of them. `kind`: their type. `patience`: from the
        values that rank 0 has, seconds to wait for the next; `own`: seconds that another rank waits for rank 0. Raises
        `ReplicaBroken` after that."""
        if self.group is None:
            return [mine]
        if not self.first:
            try:
                send(self._ends[0], encode(mine))
                self._ends[0].settimeout(own)
                values: list[T] = decode(self._expect(), list[kind])
                self._ends[0].settimeout(None)
            except OSError as error:
                raise ReplicaBroken(f"the ranks of a replica are out of step: rank 0 is silent ({error})") from error
            return values
        known = {0: mine}
        try:
            while len(known) < self.group.size:
                rank, data = self._next(known, patience(known))
                known[rank] = decode(data, kind)
        except OSError as error:
            states = ", ".join(f"rank {rank}: {one}" for rank, one in sorted(known.items()))
            raise ReplicaBroken(
                f"the ranks of a replica are out of step: a follower does not answer ({error}); {states}"
            ) from error
        return self.same(lambda: [known[rank] for rank in sorted(known)], list[kind])

    def _next(self, known: Container[int], seconds: float | None) -> tuple[int, bytes]:
        """(rank, its next frame), of one that is not in `known`. Raises `OSError` if one of them is gone, or none sends
        a frame within `seconds`."""
        poll = select.poll()
        waited = {end.fileno(): rank for rank, end in enumerate(self._ends, start=1) if rank not in known}
        for descriptor in waited:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise TimeoutError(f"no word from ranks {sorted(waited.values())} within {seconds} s")
        rank = min(waited[descriptor] for descriptor, _ in ready)
        data = receive(self._ends[rank - 1])
        if data is None:
            raise ConnectionError(f"rank {rank} has closed its end")
        return rank, data

    def agree(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors, which have the same shapes on all ranks, with rank 0's: one collective."""
        if self.group is None or not tensors:
            return
        ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)  # so that each part is aligned
        parts = [bytes_of(tensor) for tensor in ordered]
        packed = self.group.broadcast(torch.cat(parts))
        if not self.first:
            for tensor, part in zip(ordered, packed.split([len(part) for part in parts]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def compare(self, state: Mapping[str, Any]) -> None:
        """Raise `ReplicaBroken` on a rank whose state differs from rank 0's, naming the first field that does."""
        digests = {name: hashlib.blake2b(encode(value), digest_size=8).hexdigest() for name, value in state.items()}
        theirs = self.same(lambda: digests, dict[str, str])
        if self.group is not None and theirs != digests:
            name = next((name for name in theirs if theirs[name] != digests.get(name)), "fields")
            raise ReplicaBroken(
                f"rank {self.group.rank} has diverged from rank 0: its {name} differ, here {shown(state.get(name))}"
            )

    def tell(self, data: bytes) -> None:
        """Rank 0: send a frame to all others. Raises `ReplicaBroken` if one is gone."""
        try:
            for end in self._ends:
                send(end, data)
        except OSError as error:
            raise ReplicaBroken(f"a follower of this replica is gone: {error}") from error

    def receive(self) -> bytes | None:
        """Other ranks: wait for rank 0's next frame; None if it has closed its end."""
        return receive(self._ends[0])

    def out_of_step(self, error: Exception) -> ReplicaBroken:
        """Wrap an error after which this rank is at another place in the model than the others."""
        broken = ReplicaBroken(f"the ranks of a replica are out of step: {type(error).__name__}: {error}")
        broken.__cause__ = error
        return broken

    def close(self) -> None:
        """Close the sockets. Rank 0: ends the others."""
        for end in self._ends:
            end.close()

    def _expect(self) -> bytes:
        data = self.receive()
        if data is None:
            raise ReplicaBroken("rank 0 of this replica is gone")
        return data


ALONE = Ranks()
"""The link of an engine without other ranks."""
