"""Decode steps as CUDA graphs: a step of single tokens is launched as one piece, whatever the number of kernels in it.

A graph is a recording of kernels with fixed addresses and shapes. So there is one per batch size of a short list, over
tensors that live as long as it does; a step is copied into those of the next larger size and padded with rows that see
one token of a block that belongs to nobody. Captured at the start, never while requests wait.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter, FlatBatch
from segue.kernels.kv_store import KVStore
from segue.kernels.paged_step import HybridStep, PagedStep
from segue.kernels.step_tables import StepTables

Forward = tuple[torch.Tensor, torch.Tensor | None]
"""(final hidden states [rows, H], captured rows [rows, width] or None)"""
Capture = Callable[[Callable[[], Forward]], tuple[Callable[[], None], Forward]]
"""Records a function: (what runs it again, the tensors it writes to)."""


def cuda_capture(device: torch.device) -> Capture:
    """Records on `device`; all graphs share one pool of memory, since never two of them run at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Forward]) -> tuple[Callable[[], None], Forward]:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are compiled and libraries set up outside the recording
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = run()
        return graph.replay, result

    return capture


def run_again(run: Callable[[], Forward]) -> tuple[Callable[[], None], Forward]:
    """Where nothing can be recorded: the function itself, over the same fixed tensors."""
    hidden, rows = run()

    def again() -> None:
        new_hidden, new_rows = run()
        hidden.copy_(new_hidden)
        if rows is not None and new_rows is not None:
            rows.copy_(new_rows)

    return again, (hidden, rows)


@dataclass(slots=True)
class _Recorded:
    """One batch size: where its inputs go, and how it runs."""

    embeds: torch.Tensor
    positions: torch.Tensor
    groups: list[PagedStep]
    replay: Callable[[], None]
    result: Forward


class DecodeGraphs:
    """Runs steps in which every sequence has a single token."""

    def __init__(
        self,
        adapter: AutoregressiveAdapter,
        store: KVStore,
        sizes: Seq[int],
        longest: int,
        capture: Capture,
    ) -> None:
        """`store` has one block more than its pool gives out: the last. `longest`: tokens of the longest sequence.

        Raises what the model raises: a decoder that looks at values on the host cannot be recorded.
        """
        self._store = store
        self._scratch = store.num_blocks - 1
        self._width = -(-longest // store.block_size) + 1
        self._longest = longest
        self._recorded: dict[int, _Recorded] = {}
        for size in sorted(sizes, reverse=True):
            self._recorded[size] = self._record(adapter, size, capture)
        self._sizes = sorted(sizes)

    def run(self, embeds: torch.Tensor, batch: FlatBatch) -> Forward | None:
        """What `adapter.forward` gives (hidden states: valid until the next call); None where the step has more
        than one token of a sequence, prompts with extras, adapters, or too many sequences."""
        attention: PagedStep | HybridStep = batch.attention
        groups = attention.groups if isinstance(attention, HybridStep) else [attention]
        count = len(groups[0].parts)
        if len(embeds) != count or count > self._sizes[-1] or _not_recorded(batch):
            return None
        recorded = self._recorded[next(size for size in self._sizes if size >= count)]
        recorded.embeds[:count].copy_(embeds)
        recorded.positions[:, :count].copy_(batch.positions)
        for fixed, step in zip(recorded.groups, groups, strict=True):
            self._fill(fixed, step)
        recorded.replay()
        hidden, rows = recorded.result
        # hidden states are used up within the step; captured rows go on to others, who keep them
        return hidden[:count], None if rows is None else rows[:count].clone()

    def _record(self, adapter: AutoregressiveAdapter, size: int, capture: Capture) -> _Recorded:
        device = self._store.device
        ids = torch.zeros(size, dtype=torch.long, device=device)
        embeds = adapter.embed(ids, None).clone()
        positions = torch.zeros(adapter.axes, size, dtype=torch.long, device=device)
        groups = [self._fixed(size) for _ in range(self._store.layout.groups)]
        attention = groups[0] if len(groups) == 1 else HybridStep(groups, self._store.layout.group_of)
        batch = FlatBatch(ids, None, positions, attention, [(None, 0, 1)] * size)
        replay, result = capture(lambda: adapter.forward(embeds, batch))
        return _Recorded(embeds, positions, groups, replay, result)

    def _fixed(self, size: int) -> PagedStep:
        """A step of `size` rows that all see the first token of the block of nobody."""
        device = self._store.device
        slots = torch.full((size,), self._scratch * self._store.block_size, dtype=torch.long, device=device)
        tables = StepTables(
            singles=size,
            blocks=torch.full((size, self._width), self._scratch, dtype=torch.int32, device=device),
            lengths=torch.ones(size, dtype=torch.int32, device=device),
            begins=torch.arange(size, dtype=torch.int32, device=device),
            counts=torch.ones(size, dtype=torch.int32, device=device),
            longest_key=self._longest,
            longest_chunk=0,
        )
        step = PagedStep(self._store, [], slots)
        step.tables = tables
        return step

    def _fill(self, fixed: PagedStep, step: PagedStep) -> None:
        given, own = step.tables, fixed.tables
        count, width = given.blocks.shape
        own.blocks[:count, :width].copy_(given.blocks, non_blocking=True)
        own.lengths[:count].copy_(given.lengths, non_blocking=True)
        fixed.slots[:count].copy_(step.slots, non_blocking=True)
        # rows behind the last keep what an earlier step left: it must not be written to
        own.lengths[count:].fill_(1)
        own.blocks[count:, 0].fill_(self._scratch)
        fixed.slots[count:].fill_(self._scratch * self._store.block_size)


def _not_recorded(batch: FlatBatch) -> bool:
    """What goes along with a prompt's tokens is not in the recording, nor are weights of a sequence's own."""
    return any(
        prompt is not None and (start < len(prompt.token_ids) or prompt.adapter is not None)
        for prompt, start, _ in batch.prompts
    )


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then every eighth up to 64, then every sixteenth, `most` the last: little padding, few recordings."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, most + 1, 16), most}
    return sorted(size for size in sizes if size <= most)
