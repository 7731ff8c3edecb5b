"""What is free while a step is decided on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from segue.engines.autoregressive.blocks import BlockPool
from segue.engines.autoregressive.jobs import Job, Limits


class Ledger:
    """The pool's books as they would be after the decisions so far. The pool itself is only read."""

    def __init__(self, pool: BlockPool) -> None:
        self._references = pool.references
        self._change: Counter[int] = Counter()
        self.available = pool.available

    def drop(self, blocks: Seq[int]) -> None:
        for block in blocks:
            self._change[block] -= 1
            self.available += self._references[block] + self._change[block] == 0

    def holders(self, block: int) -> int:
        return self._references[block] + self._change[block]

    def shared(self, tails: Seq[int]) -> bool:
        """Whether several hold these blocks of a sequence: where one group's is shared, all groups' are."""
        return bool(tails) and self.holders(tails[0]) > 1

    def unused(self, blocks: Seq[int]) -> int:
        """How many of these blocks would leave `available` when shared."""
        return sum(self._references[block] + self._change[block] == 0 for block in blocks)

    def share(self, blocks: Seq[int]) -> None:
        self.available -= self.unused(blocks)
        self._change.update(blocks)

    def take(self, count: int) -> None:
        self.available -= count


def missing(limits: Limits, job: Job, held: Seq[int]) -> int:
    """Blocks that a sequence must still get, where it holds so many in each group."""
    return sum(max(0, least - have) for least, have in zip(limits.least_of(job), held, strict=True))
