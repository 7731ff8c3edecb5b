"""Which sequences an engine has, by their own key and by request, in step with the scheduler's queues."""

from __future__ import annotations

from collections.abc import Iterator

from segue.engines.autoregressive.scheduler import Scheduler
from segue.engines.autoregressive.sequence import Sequence


class Roster:
    """The live sequences. A request has one; after its prompt, where it asks for several outputs, one for each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._by_key: dict[str, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_key.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return self._by_key.get(sequence.job.key) is sequence

    def __getitem__(self, key: str) -> Sequence:
        return self._by_key[key]

    def of(self, request_id: str) -> tuple[Sequence, ...]:
        """The sequences of a request; none where it is not known (any more)."""
        return tuple(self._by_request.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        """It waits for its turn."""
        self._enter(sequence)
        self._scheduler.add(sequence.job)

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """`child` runs from now on with what `sequence` has in the cache."""
        self._enter(child)
        self._scheduler.fork(sequence.job, child.job)

    def replace(self, sequence: Sequence, by: Sequence) -> None:
        """A sequence goes on from what another one has in the cache."""
        self._scheduler.replace(sequence.job, by.job)

    def remove(self, sequence: Sequence) -> None:
        """It is finished, failed, cancelled or put aside."""
        self._scheduler.remove(sequence.job)
        del self._by_key[sequence.job.key]
        members = self._by_request[sequence.request.request_id]
        members.remove(sequence)
        if not members:
            del self._by_request[sequence.request.request_id]

    def _enter(self, sequence: Sequence) -> None:
        self._by_key[sequence.job.key] = sequence
        self._by_request.setdefault(sequence.request.request_id, []).append(sequence)
