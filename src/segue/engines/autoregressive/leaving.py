"""How sequences leave an engine: finished, failed or cancelled."""

from __future__ import annotations

from segue.engines.autoregressive.blocks import BlockPool
from segue.engines.autoregressive.roster import Roster
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.contract import StageOutput
from segue.kernels.kv_store import KVStore
from segue.messages.errors import SegueError


class Leaving:
    """Takes sequences off the roster, and what a drafter knows of them with them."""

    def __init__(self, roster: Roster, pool: BlockPool, store: KVStore, speculation: Speculation | None) -> None:
        self._roster = roster
        self._pool = pool
        self._store = store
        self._speculation = speculation

    def fail(self, request_id: str, error: SegueError, *, scrub: bool = False) -> StageOutput:
        """The output of a request that fails. `scrub`: its K and V may hold NaN, which would spoil, through the masked
        part of a block, whoever gets the block next."""
        if scrub:
            held = [block for sequence in self._roster.of(request_id) for block in sequence.job.blocks]
            self.scrub(held)
        self.drop(request_id)
        return StageOutput(request_id, error=error)

    def scrub(self, blocks: list[int]) -> None:
        """Zeros into those of the blocks that nobody else holds."""
        self._store.scrub(self._pool.private(blocks))

    def drop(self, request_id: str) -> None:
        """Forget a request."""
        for sequence in self._roster.of(request_id):
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget one of its sequences."""
        self._roster.remove(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence.job.key)
