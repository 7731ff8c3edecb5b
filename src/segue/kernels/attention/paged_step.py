"""Attention metadata of one step: the slots of each token's K and V, and the blocks that each query sees.

Built once per step, used by every layer. Tokens of a step are concatenated sequence by sequence: first sequences with a
single query (decoding), sorted by length, then longer chunks (prefill). A `Part` is one sequence's share of a step.
`StepTables` are the step's block tables as attention kernels read them: one row per sequence, int32, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from segue.kernels.attention.interface import Attends, AttentionWindow, Chunked
from segue.kernels.attention.spans import SlotSpan, slot_runs
from segue.kernels.kv.store import KVStore
from segue.kernels.staging import upload, upload_all


class Part(NamedTuple):
    """One sequence's part of a step: its block table, and the range of its tokens that is computed.

    If its first blocks were freed (they lie before this group's attention window), `blocks` starts after them and
    `start` and `stop` count from there: attention is causal and windows are relative, so nothing else changes.
    """

    blocks: Sequence[int]
    start: int
    stop: int
    bidirectional: Sequence[tuple[int, int]] = ()
    """Ranges of tokens, in order, that attend to each other in both directions. Each lies entirely inside or outside
    [start, stop)."""

    def reaches(self) -> np.ndarray:
        """[stop - start] int32: for each query, how many leading tokens of the sequence it sees."""
        reach = np.arange(self.start + 1, self.stop + 1, dtype=np.int32)
        for first, end in self.bidirectional:
            if self.start <= first and end <= self.stop:
                reach[first - self.start : end - self.start] = end
        return reach

    @property
    def causal(self) -> bool:
        """Whether no query sees a token after it."""
        return not any(self.start <= first < self.stop for first, _ in self.bidirectional)


def leading_singles(parts: Sequence[Part]) -> int:
    """Number of single-query parts at the start of a step. Single queries also follow longer parts, where a chunk
    border cuts them off."""
    return sum(1 for _ in takewhile(lambda part: part.stop - part.start == 1, parts))


def within_chunks(part: Part, back: AttentionWindow, before: int, block_size: int) -> list[Part]:
    """The part as layers with this attention window see it. `before`: tokens of the sequence before its first block.

    With chunked attention, each piece of the part within one chunk becomes its own sequence, which starts with the
    chunk: attention is causal, so nothing else changes.
    """
    if not isinstance(back, Chunked):
        return [part]
    pieces = []
    start = part.start
    while start < part.stop:
        border = (start + before) // back.size * back.size - before
        stop = min(part.stop, border + back.size)
        blocks = part.blocks[border // block_size :] if border else part.blocks
        pieces.append(Part(blocks, start - border, stop - border))
        start = stop
    return pieces


class Span(Protocol):
    """A range of tokens of a sequence."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def step_order(part: Span) -> tuple[bool, int]:
    """Sort key of the parts of a step; positions count from the sequence's start."""
    return part.stop - part.start > 1, part.stop


@dataclass(slots=True)
class StepTables:
    """Block tables of sequences in the order of the flat batch: first those with a single query."""

    singles: int
    blocks: torch.Tensor
    """[sequences, most]: entries after a sequence's last block are not read."""
    lengths: torch.Tensor
    """[sequences] number of keys, including those of its own queries."""
    begins: torch.Tensor
    """[sequences] flat index of its first query."""
    counts: torch.Tensor
    """[sequences] number of its queries."""
    longest_key: int
    """Most keys that any of the single queries sees."""
    longest_chunk: int
    """Most queries of any other sequence."""
    reaches: torch.Tensor | None = None
    """[tokens] how many leading keys each query sees; None: all queries are causal."""


def step_tables(parts: Sequence[Part], block_size: int, device: torch.device) -> StepTables:
    """Build the tables of a step in one upload."""
    singles = leading_singles(parts)
    needed = [-(-part.stop // block_size) for part in parts]
    packed = np.zeros((len(parts), 3 + max(needed)), dtype=np.int32)
    begin = 0
    for row, part, count in zip(packed, parts, needed, strict=True):
        row[:3] = part.stop, begin, part.stop - part.start
        row[3 : 3 + count] = part.blocks[:count]
        begin += part.stop - part.start
    there = upload(packed, device)
    bidirectional = any(not part.causal for part in parts)
    return StepTables(
        singles=singles,
        blocks=there[:, 3:],
        lengths=there[:, 0].contiguous(),
        begins=there[:, 1].contiguous(),
        counts=there[:, 2].contiguous(),
        longest_key=max((part.stop for part in parts[:singles]), default=0),
        longest_chunk=max((part.stop - part.start for part in parts[singles:]), default=0),
        reaches=upload(np.concatenate([part.reaches() for part in parts]), device) if bidirectional else None,
    )


@dataclass(slots=True)
class DecodeGroup:
    """Single-query sequences of similar length, padded to the longest."""

    begin: int
    end: int
    """Their range of flat tokens."""
    blocks: torch.Tensor
    """[(end - begin) * n] long; padded with a sequence's own last block, so that it never reads another's blocks."""
    lengths: torch.Tensor
    """[end - begin] long: tokens that each query sees, including itself."""
    parts: list[Part]
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _spans: dict[int | None, list[SlotSpan] | None] = field(default_factory=dict)

    def spans(self, window: int | None, block_size: int, least: int) -> list[SlotSpan] | None:
        """The visible tokens as spans of slots; None if gathering is faster because blocks are scattered or sequences
        short: each of several spans must save the gathering of `least` tokens."""
        if window not in self._spans:
            found = [
                SlotSpan(row, *run)
                for row, part in enumerate(self.parts)
                for run in slot_runs(part.blocks, max(0, part.stop - window) if window else 0, part.stop, block_size)
            ]
            gathered = len(self.blocks) * block_size
            # attention over gathered keys is one call, too: a single span saves all of the gathering
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
    """Queries of one sequence: several, or those that a chunk border cut off."""

    begin: int
    end: int
    """Its range of flat tokens."""
    start: int
    """Tokens of the sequence before this chunk."""
    blocks: torch.Tensor
    """[n] long: the blocks of its tokens and of those before the chunk."""
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
        """[queries, 2] int32: the first key that each query sees, and the key after the last."""
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
    """The keyword argument `paged` of a decoder's forward if all layers have the same attention window; otherwise that
    of one group of layers. Metadata of a backend is computed when it first asks for it, once per step."""

    store: KVStore
    parts: list[Part]
    slots: torch.Tensor
    """[tokens] long: the slot of each token's K, V and captured row."""

    @property
    def groups(self) -> list[PagedStep]:
        """The step from the view of each group of layers."""
        return [self]

    def of(self, layer: int) -> PagedStep:
        """The step from the view of this layer."""
        return self

    @cached_property
    def decodes(self) -> list[DecodeGroup]:
        """Sequences with a single query, in groups of similar length."""
        return decode_groups(self.parts, self.store.block_size, self.store.device)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All other sequences."""
        return prefill_chunks(self.parts, self.store.block_size, self.store.device)

    @cached_property
    def tables(self) -> StepTables:
        """For kernels that read K and V in place."""
        return step_tables(self.parts, self.store.block_size, self.store.device)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Data that a backend shares between the layers of this step."""
        return {}


AttentionBackend: TypeAlias = Attends[PagedStep]
"""A backend for the steps of an engine."""


@dataclass(slots=True)
class HybridStep:
    """The keyword argument `paged` of a decoder with several groups of layers (`kv_layout`)."""

    groups: list[PagedStep]
    """All with the same flat tokens in the same order. Positions count from the first block that a sequence still
    holds, or from the first of a chunk, at which parts are split."""
    group_of: Sequence[int]
    """[layers]"""

    @property
    def slots(self) -> torch.Tensor:
        """[tokens] long: the slot of each token's captured row."""
        return self.groups[0].slots

    def of(self, layer: int) -> PagedStep:
        """The step from the view of this layer."""
        return self.groups[self.group_of[layer]]


def joined(groups: list[PagedStep], group_of: Sequence[int]) -> PagedStep | HybridStep:
    """The keyword argument `paged` of a decoder's forward, from the view of each group of layers on a step. `group_of`
    [layers]."""
    return groups[0] if len(groups) == 1 else HybridStep(groups, group_of)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def paged_step(store: KVStore, parts: list[Part]) -> PagedStep:
    """Plan a step. `parts`: those with a single query first; sorting by `step_order` minimises padding."""
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
    """Groups of the sequences with a single query, which come first."""
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
    """Chunks of the sequences with several queries, which come last."""
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
