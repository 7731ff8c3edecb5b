"""KV blocks of a drafter: its own pool, a table per sequence, and flat steps over them.

A drafter's cache is optional: missing entries are recomputed, or there are no drafts. So when blocks run short, the
sequences that drafted least recently lose theirs, and no sequence waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.contract import KVSpec
from segue.kernels.attention.interface import Chunked
from segue.kernels.attention.paged_step import PagedStep, Part, paged_step, step_order
from segue.kernels.kv.layout import KVLayout
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError


class Span(NamedTuple):
    """One sequence's part of a drafter's step: slots [start, stop) of its own table."""

    key: str
    start: int
    stop: int


def keeping(spec: KVSpec) -> KVLayout:
    """The layout of a drafter's cache: one group of layers, which frees nothing before the sequence ends. Raises
    `ConfigError` for layers that attend in chunks, because a table may start after the sequence's beginning."""
    if any(isinstance(back, Chunked) for back in spec.windows):
        raise ConfigError("a model whose layers attend in chunks cannot draft", field="speculation")
    return replace(spec, windows=(), capture_width=0, bidirectional=frozenset()).layout(0)


class DraftCache:
    """Blocks and tables. A slot is an index in a sequence's table, not in its text, as a table may start late."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._store = KVStore(
            keeping(spec), num_blocks=num_blocks, block_size=block_size, dtype=spec.dtype, device=device
        )
        self._pool = BlockPool(num_blocks)
        self._size = block_size
        self._tables: OrderedDict[str, list[int]] = OrderedDict()  # least recently used first

    def reserve(self, key: str, slots: int, keep: set[str]) -> bool:
        """Allocate blocks for this many slots of a sequence, evicting sequences that are not in `keep` if necessary."""
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
        """Free the blocks of a sequence. Unknown keys are ignored."""
        self._pool.release(self._tables.pop(key, []))

    def step(self, spans: Sequence[Span]) -> tuple[list[int], PagedStep]:
        """(indices of the spans in the order of the flat batch, the attention metadata)."""
        parts = [Part(self._tables[span.key], span.start, span.stop) for span in spans]
        order = sorted(range(len(parts)), key=lambda place: step_order(parts[place]))
        return order, paged_step(self._store, [parts[place] for place in order])

    def audit(self) -> None:
        """Check the state; an `AssertionError` says what is inconsistent."""
        self._pool.audit(self._tables.values())
