"""KV blocks of a drafter: its own pool, a table per sequence, and flat steps over them.

A drafter's cache is a convenience: what is not in it is computed again or done without. So where blocks are short, the
sequences that drafted least recently lose theirs, and nobody waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from segue.engines.autoregressive.blocks import BlockPool
from segue.engines.autoregressive.contract import KVSpec
from segue.kernels.kv_layout import KVLayout
from segue.kernels.kv_store import KVStore
from segue.kernels.look_back import Chunked
from segue.kernels.paged_step import PagedStep, paged_step
from segue.kernels.part import Part, step_order
from segue.messages.errors import ConfigError


class Span(NamedTuple):
    """A sequence's part in a drafter's step: slots [start, stop) of its own table."""

    key: str
    start: int
    stop: int


def keeping(spec: KVSpec) -> KVLayout:
    """The layout of a drafter's cache: one group of layers, which gives nothing back before the sequence ends. Raises
    `ConfigError` for layers that attend in chunks: a table need not begin with the sequence."""
    if any(isinstance(back, Chunked) for back in spec.windows):
        raise ConfigError("a model whose layers attend in chunks cannot draft", field="speculation")
    return replace(spec, windows=(), capture_width=0, mutual=frozenset()).layout(0)


class DraftCache:
    """Blocks and tables. A slot is a place in a sequence's table, not in its text: a table may begin late."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._store = KVStore(
            keeping(spec), num_blocks=num_blocks, block_size=block_size, dtype=spec.dtype, device=device
        )
        self._pool = BlockPool(num_blocks)
        self._size = block_size
        self._tables: OrderedDict[str, list[int]] = OrderedDict()  # least recently used first

    def reserve(self, key: str, slots: int, keep: set[str]) -> bool:
        """Make room for so many slots of a sequence, if need be at the cost of others that are not in `keep`."""
        table = self._tables.setdefault(key, [])
        self._tables.move_to_end(key)
        missing = -(-slots // self._size) - len(table)
        if missing <= 0:
            return True
        if missing > self._pool.available:
            for other in [name for name in self._tables if name != key and name not in keep]:
                self.release(other)
                if missing <= self._pool.available:
                    break
            else:
                return False
        table += self._pool.allocate(missing)
        return True

    def __contains__(self, key: str) -> bool:
        return key in self._tables

    def release(self, key: str) -> None:
        """Forget a sequence. Unknown keys are ignored."""
        self._pool.release(self._tables.pop(key, []))

    def step(self, spans: Sequence[Span]) -> tuple[list[int], PagedStep]:
        """(places of the spans in the order of the flat batch, what attention needs)."""
        parts = [Part(self._tables[span.key], span.start, span.stop) for span in spans]
        order = sorted(range(len(parts)), key=lambda place: step_order(parts[place]))
        return order, paged_step(self._store, [parts[place] for place in order])

    def audit(self) -> None:
        """Check the books; an `AssertionError` says what is off."""
        self._pool.audit(self._tables.values())
