"""The active sequences of an engine, by key and by request: it adds and removes them together with their entries in the
scheduler's queues and the drafter's state for them."""

from __future__ import annotations

from collections.abc import Iterator

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.schedule.scheduler import Scheduler
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.kernels.kv.store import KVStore
from segue.messages.errors import SegueError
from segue.messages.units import TurnEnd


class ActiveSequences:
    """The live sequences. A request has one; after its prompt it has one per output, if it asks for several."""

    def __init__(self, scheduler: Scheduler, pool: BlockPool, store: KVStore, speculation: Speculation | None) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._store = store
        self._speculation = speculation
        self._by_key: dict[str, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._kept: dict[str, Sequence] = {}
        """Those that hold their blocks after the end of their requests, by key."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_key.values())

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and self._by_key.get(sequence.scheduled.key) is sequence

    def __getitem__(self, key: str) -> Sequence:
        return self._by_key[key]

    def of(self, request_id: str) -> tuple[Sequence, ...]:
        """The sequences of a request; none if it is unknown or has ended."""
        return tuple(self._by_request.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue."""
        self._enter(sequence)
        self._scheduler.add(sequence.scheduled)

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Start `child` running with everything that `sequence` has in the cache."""
        self._enter(child)
        self._scheduler.fork(sequence.scheduled, child.scheduled)

    def replace(self, sequence: Sequence, by: Sequence) -> None:
        """Replace the cached tokens of a sequence with those of `by`."""
        self._scheduler.replace(sequence.scheduled, by.scheduled)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is finished, failed, cancelled or set aside."""
        self._scheduler.remove(sequence.scheduled)
        self._kept.pop(sequence.scheduled.key, None)
        self._leave(sequence)

    def keep(self, sequence: Sequence, end: TurnEnd, block_size: int) -> None:
        """Let a sequence hold its blocks after the end of its request, under a key of its own: requests that go on from
        it find them in the prefix cache. A kept sequence is never continued itself."""
        key = f"{sequence.request.request_id}\0kept"
        self.drop(key)  # of an earlier attempt of the request
        self._leave(sequence)
        sequence.keep(key, end, block_size)
        self._enter(sequence)
        self._kept[key] = sequence

    def forget_kept(self) -> None:
        """Remove the kept sequences that have lost their blocks: they held too long, or others needed the blocks."""
        for sequence in [one for one in self._kept.values() if not one.scheduled.running]:
            self.remove(sequence)

    def drop(self, request_id: str) -> None:
        """Remove all sequences of a request."""
        for sequence in self.of(request_id):
            self.remove(sequence)

    def fail(self, request_id: str, error: SegueError, *, scrub: bool = False) -> TokenOutput:
        """Fail a request and return its output. `scrub`: its K and V may hold NaN, which would reach the next owner of
        a block through the masked part of that block."""
        if scrub:
            self.scrub([block for sequence in self.of(request_id) for block in sequence.scheduled.blocks])
        self.drop(request_id)
        return TokenOutput(request_id, error=error)

    def scrub(self, blocks: list[int]) -> None:
        """Zero those of the blocks that no other sequence holds."""
        self._store.scrub(self._pool.private(blocks))

    def _leave(self, sequence: Sequence) -> None:
        del self._by_key[sequence.scheduled.key]
        members = self._by_request[sequence.request.request_id]
        members.remove(sequence)
        if not members:
            del self._by_request[sequence.request.request_id]
        if self._speculation is not None:
            self._speculation.forget(sequence.scheduled.key)

    def _enter(self, sequence: Sequence) -> None:
        self._by_key[sequence.scheduled.key] = sequence
        self._by_request.setdefault(sequence.request.request_id, []).append(sequence)
