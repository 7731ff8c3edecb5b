"""The ranks of a replica as threads of this process: real sockets between them, and collectives in memory.

One thread computes at a time: they take turns where a rank waits for others.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from segue.engines.ranks import Leading, follow
from segue.parallel.group import Group
from segue.parallel.ranks import Ranks


class Meeting:
    """Where the ranks of a group exchange tensors, and whose turn it is."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=240)
        self.given: list[Any] = [None] * size
        self.turn = threading.Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, it is the others' turn."""
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()


class ThreadGroup:
    """As much of a `Group` as engines and layers need."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, len(meeting.given)
        self.device = torch.device("cpu")
        self.meeting = meeting

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        meeting = self.meeting
        meeting.given[self.rank] = tensor.clone()
        with meeting.waiting():
            meeting.barrier.wait()
        given = list(meeting.given)
        with meeting.waiting():
            meeting.barrier.wait()
        return given

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._exchange(tensor)[0])

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(dim=0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor))


class ThreadRanks(Ranks):
    """Gives up its turn while it waits for rank 0."""

    def receive(self) -> bytes | None:
        with cast(Any, self.group).meeting.waiting():
            return super().receive()


class Audited(Leading):
    """Rank 0's engine for tests that look into it."""

    def audit(self) -> None:
        self.inner.audit()  # type: ignore[attr-defined]


class Replica:
    """Ranks that run one engine each."""

    def __init__(self, build: Callable[[Ranks], Any], size: int = 2) -> None:
        """`build`: makes a rank's engine."""
        self._meeting = meeting = Meeting(size)
        groups = [cast(Group, ThreadGroup(meeting, rank)) for rank in range(size)]
        pairs = [socket.socketpair() for _ in range(1, size)]
        self._far = [far for _, far in pairs]
        self.engines: list[Any] = [None] * size
        self.failures: list[BaseException] = []
        """Of ranks from 1 on."""
        self._threads = [
            threading.Thread(target=self._live, args=(build, rank, groups[rank]), daemon=True)
            for rank in range(1, size)
        ]
        meeting.turn.acquire()
        for thread in self._threads:
            thread.start()
        self.ranks: Ranks = ThreadRanks(groups[0], [near for near, _ in pairs])
        self.engines[0] = build(self.ranks)
        self.lead = Audited(self.engines[0], self.ranks, compared_every=2)

    def _live(self, build: Callable[[Ranks], Any], rank: int, group: Group) -> None:
        with self._meeting.turn, torch.inference_mode():
            try:
                ranks = ThreadRanks(group, [self._far[rank - 1]])
                self.engines[rank] = build(ranks)
                follow(self.engines[rank], ranks)
            except BaseException as error:
                self.failures.append(error)
                self._meeting.barrier.abort()
            finally:
                self._far[rank - 1].close()

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()
        self._meeting.turn.release()
        for thread in self._threads:
            thread.join(240)
            assert not thread.is_alive(), "a rank hangs"


@contextmanager
def replica(build: Callable[[Ranks], Any], size: int = 2) -> Iterator[Replica]:
    """Ranks whose engines end up with equal states."""
    made = Replica(build, size)
    try:
        yield made
    finally:
        made.close()
    if made.failures:
        raise made.failures[0]
    states = [engine.shared_state() for engine in made.engines]
    assert all(other == states[0] for other in states[1:]), "the ranks have diverged"
