"""What attention needs to know of one step: where each token's K and V go, and which blocks each query sees.

Built once per step, used by every layer. Tokens of a step lie flat, one sequence after the other: first those with a
single query (decoding), sorted by length, then longer chunks (prefill).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from segue.kernels.attends import Attends
from segue.kernels.kv_store import KVStore
from segue.kernels.part import Part, leading_singles
from segue.kernels.spans import SlotSpan, slot_runs
from segue.kernels.staging import upload, upload_all
from segue.kernels.step_tables import StepTables, step_tables


@dataclass(slots=True)
class DecodeGroup:
    """Single-query sequences of similar length, padded to the longest."""

    begin: int
    end: int
    """Their range of flat tokens."""
    blocks: torch.Tensor
    """[(end - begin) * n] long; padded with a sequence's own last block, so that none ever reads another's."""
    lengths: torch.Tensor
    """[end - begin] long: tokens each query sees, itself included."""
    parts: list[Part]
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _spans: dict[int | None, list[SlotSpan] | None] = field(default_factory=dict)

    def spans(self, window: int | None, block_size: int, least: int) -> list[SlotSpan] | None:
        """What the queries see, as spans of slots; None where gathering is quicker, because the blocks are scattered or
        the sequences short: each of several spans must save gathering of `least` tokens."""
        if window not in self._spans:
            found = [
                SlotSpan(row, *run)
                for row, part in enumerate(self.parts)
                for run in slot_runs(part.blocks, max(0, part.stop - window) if window else 0, part.stop, block_size)
            ]
            gathered = len(self.blocks) * block_size
            # attention over what is gathered is one call, too: a single span saves all of the gathering
            self._spans[window] = found if len(found) == 1 or len(found) * least <= gathered else None
        return self._spans[window]

    def mask(self, window: int | None, dtype: torch.dtype, block_size: int) -> torch.Tensor:
        """[end - begin, 1, 1, n * block_size], 0 where the query sees a key and -inf elsewhere."""
        mask = self._masks.get((window, dtype))
        if mask is None:
            count = self.end - self.begin
            key = torch.arange(len(self.blocks) // count * block_size, device=self.blocks.device)
            seen = key < self.lengths[:, None]
            if window is not None:
                seen &= key > self.lengths[:, None] - 1 - window
            mask = self._masks[(window, dtype)] = additive(seen, dtype)[:, None, None]
        return mask


@dataclass(slots=True)
class Chunk:
    """Queries of one sequence: several, or those that a border between chunks of attention left over."""

    begin: int
    end: int
    """Its range of flat tokens."""
    start: int
    """Tokens of the sequence before this chunk."""
    blocks: torch.Tensor
    """[n] long: the blocks of its tokens, those before the chunk included."""
    part: Part
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _spans: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _table: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        """`blocks` as int32."""
        if self._table is None:
            self._table = self.blocks.to(torch.int32)
        return self._table

    def spans(self, window: int | None) -> torch.Tensor:
        """[queries, 2] int32: each query sees the keys from the first number on, until before the second."""
        spans = self._spans.get(window)
        if spans is None:
            reach = self.part.reaches()
            first = np.zeros_like(reach)
            if window is not None:
                first = np.maximum(np.arange(self.start + 1, self.start + 1 + len(reach), dtype=np.int32) - window, 0)
            spans = self._spans[window] = upload(np.stack([first, reach], axis=1), self.blocks.device)
        return spans

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[queries, start + queries], 0 where a query sees a key and -inf elsewhere."""
        mask = self._masks.get((window, dtype))
        if mask is None:
            stop = self.start + self.end - self.begin
            key = torch.arange(stop, device=self.blocks.device)
            query = key[self.start :, None]
            seen = key < upload(self.part.reaches(), key.device)[:, None]
            if window is not None:
                seen &= key > query - window
            mask = self._masks[(window, dtype)] = additive(seen, dtype)
        return mask


@dataclass
class PagedStep:
    """The keyword argument `paged` of a decoder's forward whose layers all look back equally far; else that of a group
    of its layers. What a backend needs besides is worked out when it asks for it, once per step."""

    store: KVStore
    parts: list[Part]
    slots: torch.Tensor
    """[tokens] long: where each token's K, V and captured row go."""

    def of(self, layer: int) -> PagedStep:
        """The step as this layer sees it."""
        return self

    @cached_property
    def decodes(self) -> list[DecodeGroup]:
        """The sequences with a single query, in groups."""
        return decode_groups(self.parts, self.store.block_size, self.store.device)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The others."""
        return prefill_chunks(self.parts, self.store.block_size, self.store.device)

    @cached_property
    def tables(self) -> StepTables:
        """For kernels that read K and V where they lie."""
        return step_tables(self.parts, self.store.block_size, self.store.device)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """What a backend keeps from one layer of this step to the next."""
        return {}


AttentionBackend: TypeAlias = Attends[PagedStep]
"""What attends to the steps of an engine."""


@dataclass(slots=True)
class HybridStep:
    """The keyword argument `paged` of a decoder with several groups of layers (`kv_layout`)."""

    groups: list[PagedStep]
    """All with the same flat tokens in the same order; positions count from the first block a sequence still has, or
    the first of a chunk, at which parts are cut."""
    group_of: Sequence[int]
    """[layers]"""

    @property
    def slots(self) -> torch.Tensor:
        """[tokens] long: where each token's captured row goes."""
        return self.groups[0].slots

    def of(self, layer: int) -> PagedStep:
        """The step as this layer sees it."""
        return self.groups[self.group_of[layer]]


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def paged_step(store: KVStore, parts: list[Part]) -> PagedStep:
    """Plan a step. `parts`: those with a single query first; sorted by `step_order` they are padded least."""
    size = store.block_size
    slots: list[np.ndarray] = []
    singles = parts[: leading_singles(parts)]
    if singles:
        last = np.array([part.stop - 1 for part in singles])
        blocks = np.array([part.blocks[(part.stop - 1) // size] for part in singles])
        slots.append(blocks * size + last % size)
    for part in parts[len(singles) :]:
        table = np.array(part.blocks[: -(-part.stop // size)])
        position = np.arange(part.start, part.stop)
        slots.append(table[position // size] * size + position % size)
    return PagedStep(store, parts, upload(np.concatenate(slots), store.device))


def decode_groups(parts: list[Part], block_size: int, device: torch.device) -> list[DecodeGroup]:
    """The sequences with a single query, which come first."""
    singles = parts[: leading_singles(parts)]
    groups = []
    begin = 0
    while begin < len(singles):
        end = _similar(singles, begin, block_size)
        group = singles[begin:end]
        width = -(-max(part.stop for part in group) // block_size)
        table = np.empty((len(group), width), dtype=np.int64)
        for row, part in zip(table, group, strict=True):
            count = -(-part.stop // block_size)
            row[:count] = part.blocks[:count]
            row[count:] = part.blocks[count - 1]
        lengths = np.array([part.stop for part in group])
        blocks, seen = upload_all([table.ravel(), lengths], device)
        groups.append(DecodeGroup(begin, end, blocks, seen, group))
        begin = end
    return groups


def prefill_chunks(parts: list[Part], block_size: int, device: torch.device) -> list[Chunk]:
    """The sequences with several queries, which come last."""
    chunks = []
    begin = singles = leading_singles(parts)
    for part in parts[singles:]:
        end = begin + part.stop - part.start
        table = np.array(part.blocks[: -(-part.stop // block_size)])
        chunks.append(Chunk(begin, end, part.start, upload(table, device), part))
        begin = end
    return chunks


def _similar(singles: list[Part], begin: int, block_size: int) -> int:
    """End of the group that starts at `begin`: sequences up to half as long again share a padded batch."""
    shortest = longest = singles[begin].stop
    end = begin + 1
    while end < len(singles):
        shortest, longest = min(shortest, singles[end].stop), max(longest, singles[end].stop)
        if longest > shortest * 3 // 2 + 4 * block_size:
            break
        end += 1
    return end
