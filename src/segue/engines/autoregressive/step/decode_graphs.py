"""Captured graphs for decode steps: a step of single tokens is one launch, whatever its number of kernels.

A captured graph (a CUDA graph; on a CPU a list of calls: `segue.kernels.graphs.replay`) has fixed addresses and shapes,
so there is one per batch size of a short list, over tensors that live as long as the graph. On a GPU a step is copied
into the tensors of the next larger size and padded with rows that attend to one token of an unowned block; all
sizes are captured at the start, never while requests wait. On a CPU, where every row costs time, a step runs at its own
size. The smallest sizes are captured at the start, which shows whether the model can be captured; others are captured
in their third step, which takes about three times as long as a plain one.

Optional reading: a dispatcher asks `DecodeGraphs` to run a step's batch, and calls the model itself where that has no
graph.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from segue.engines.autoregressive.contract import AutoregressiveModel, FlatBatch, Recordable
from segue.kernels.attention.paged_step import PagedStep, StepTables, joined
from segue.kernels.graphs.replay import Capture, NotRecordable, TooLarge, capture_on
from segue.kernels.kv.store import KVStore

logger = logging.getLogger(__name__)

USES = 3
"""On a CPU, the n-th step of a size records it."""
_FIRST = 8
"""Sizes up to this are recorded in turn at the start, until that has taken `SECONDS`."""
SECONDS = 2.0
_SMALL = 2
"""Sizes up to this are verified with more trials."""

Forward = tuple[torch.Tensor, torch.Tensor | None]
"""(final hidden states [rows, H], captured rows [rows, width] or None)"""


def run_again(run: Callable[[], Forward]) -> tuple[Callable[[], None], Forward]:
    """Substitute for a capture if the device has none: calls the function again over the same fixed tensors."""
    hidden, rows = run()

    def again() -> None:
        new_hidden, new_rows = run()
        hidden.copy_(new_hidden)
        if rows is not None and new_rows is not None:
            rows.copy_(new_rows)

    return again, (hidden, rows)


@dataclass(slots=True)
class _Recorded:
    """One recorded batch size: its input tensors and its replay function."""

    token_ids: torch.Tensor
    embeds: torch.Tensor
    positions: torch.Tensor
    groups: list[PagedStep]
    batch: FlatBatch
    """Over the tensors above."""
    replay: Callable[[], None]
    result: Forward


class DecodeGraphs:
    """Runs decode steps (one token per sequence) from captured graphs."""

    def __init__(
        self,
        model: AutoregressiveModel,
        store: KVStore,
        longest: int,
        capture: Capture[Forward],
        *,
        padded: bool,
        later: int = 0,
    ) -> None:
        """`store` has one block more than its pool hands out: the last. `longest`: tokens of the longest sequence.
        `padded`: a step runs at the next larger recorded size; otherwise only at its own. `later`: sizes up to this may
        be recorded while serving.
        """
        self._model = model
        self._store = store
        self._capture = capture
        self._padded = padded
        self._scratch = store.num_blocks - 1
        self._width = -(-longest // store.block_size) + 1
        self._longest = longest
        self._recorded: dict[int, _Recorded] = {}
        self._sizes: list[int] = []
        self._later = later
        self._inputs: dict[str, torch.Tensor] = {}
        """By name, with the most rows possible: shared by all sizes that are recorded while serving."""
        self._came: Counter[int] = Counter()
        """Number of steps of each unrecorded size."""

    def add(self, size: int) -> None:
        """Record a step of `size` sequences; on a GPU record the largest size first. Raises what the model raises: a
        decoder that reads values on the host cannot be recorded."""
        self._recorded[size] = self._record(size)
        bisect.insort(self._sizes, size)

    @torch.inference_mode()
    def faithful(self, size: int, trials: int) -> bool:
        """Whether a replay gives bit-identical results to the decoder on values that it was not recorded with: random
        rows, lengths and positions; with more `trials`, also the first and the last consecutive positions (the library
        checks for these)."""
        recorded = self._recorded[size]
        device, last = self._store.device, self._longest - 1
        generator = torch.Generator(device).manual_seed(size)
        length = min(self._longest, self._store.block_size)
        in_a_row = torch.arange(size, device=device).clamp(max=last)
        drawn = torch.empty_like(recorded.positions).random_(0, self._longest, generator=generator)
        for positions in [drawn, in_a_row, last - in_a_row.flip(0)][:trials]:
            recorded.token_ids.random_(0, self._model.vocab_size, generator=generator)
            recorded.embeds.normal_(generator=generator)
            recorded.positions.copy_(positions)
            for group in recorded.groups:
                group.tables.lengths.random_(1, length + 1, generator=generator)
                group.slots.copy_(group.tables.lengths - 1 + self._scratch * self._store.block_size)
            self._store.scrub([self._scratch])
            expected = [tensor.clone() for tensor in _there(self._model.forward(recorded.embeds, recorded.batch))]
            self._store.scrub([self._scratch])
            recorded.replay()
            made = _there(recorded.result)
            if not all(map(torch.equal, made, expected)):
                return False
        return True

    def run(self, embeds: torch.Tensor, batch: FlatBatch) -> Forward | None:
        """The result of `model.forward` (hidden states: valid until the next call); None if the step has more than one
        token of a sequence, prompts with extras, LoRA adapters, or too many sequences."""
        groups: list[PagedStep] = batch.attention.groups
        count = len(groups[0].parts)
        single = all(len(step.parts) == len(embeds) for step in groups)
        if not single or _not_recorded(batch):
            return None
        recorded = self._recorded_for(count) or self._recorded_now(count)
        if recorded is None:
            return None
        recorded.token_ids[:count].copy_(batch.token_ids)
        recorded.embeds[:count].copy_(embeds)
        recorded.positions[:, :count].copy_(batch.positions)
        for fixed, step in zip(recorded.groups, groups, strict=True):
            self._fill(fixed, step)
        recorded.replay()
        hidden, rows = recorded.result
        # hidden states are consumed within the step; captured rows are kept by others, so they are cloned
        return hidden[:count], None if rows is None else rows[:count].clone()

    def _recorded_for(self, count: int) -> _Recorded | None:
        if count in self._recorded or not self._padded:
            return self._recorded.get(count)
        larger = next((size for size in self._sizes if size > count), None)
        return None if larger is None else self._recorded[larger]

    def _recorded_now(self, count: int) -> _Recorded | None:
        if count > self._later:
            return None
        self._came[count] += 1
        if self._came[count] == USES:
            try:
                self.try_on(count)
            except TooLarge:
                self._later = count - 1
            except NotRecordable as error:
                self._later = 0
                logger.info("decode steps of further sizes run uncaptured: %s", error, exc_info=error.__cause__)
        return self._recorded.get(count)

    def try_on(self, size: int) -> None:
        """Record a step of `size` sequences and verify it on other values: a decoder that branches on its inputs must
        not be replayed. Raises `NotRecordable`."""
        faithful = False
        try:
            self.add(size)
            faithful = self.faithful(size, trials=3 if size <= _SMALL else 1)
        except NotRecordable:
            raise
        # any kind: library code that runs well may raise any class of error while its operators are captured; steps
        # then run without the graph
        except Exception as error:
            raise NotRecordable(f"{type(error).__name__}: {error}") from error
        finally:
            if not faithful:
                self._recorded.pop(size, None)
        if not faithful:
            raise NotRecordable(f"a replay of {size} rows gives a different result")

    def _record(self, size: int) -> _Recorded:
        model = self._model
        device = self._store.device
        ids = torch.zeros(size, dtype=torch.long, device=device)
        embeds = self._input(
            "embeds", size, lambda rows: model.embed(torch.zeros(rows, dtype=torch.long, device=device), None).clone()
        )
        positions = torch.zeros(model.axes, size, dtype=torch.long, device=device)
        groups = [self._fixed(size, group) for group in range(self._store.layout.groups)]
        attention = joined(groups, self._store.layout.group_of)
        batch = FlatBatch(ids, None, positions, attention, [(None, 0, 1)] * size)

        def run() -> Forward:
            # values that a backend derives from lengths and caches for the layers must be derived in every replay
            for group in groups:
                group.plans.clear()
            return model.forward(embeds, batch)

        replay, result = self._capture(run)
        return _Recorded(ids, embeds, positions, groups, batch, replay, result)

    def _input(self, name: str, size: int, made: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """[size, …], the tensor that a step's input is copied into. Graphs captured while serving share it, as no two
        of them run at once: one per size would take memory outside the budget."""
        if not self._later:
            return made(size)
        if name not in self._inputs:
            self._inputs[name] = made(self._later)
        return self._inputs[name][:size]

    def _fixed(self, size: int, group: int) -> PagedStep:
        """A step of `size` rows that all attend to the first token of the unowned block."""
        device = self._store.device
        blocks = self._input(
            f"blocks of group {group}",
            size,
            lambda rows: torch.full((rows, self._width), self._scratch, dtype=torch.int32, device=device),
        )
        blocks.fill_(self._scratch)
        slots = torch.full((size,), self._scratch * self._store.block_size, dtype=torch.long, device=device)
        tables = StepTables(
            singles=size,
            blocks=blocks,
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
        # rows behind the last keep values of an earlier step: its slots must not be written to
        own.lengths[count:].fill_(1)
        own.blocks[count:, 0].fill_(self._scratch)
        fixed.slots[count:].fill_(self._scratch * self._store.block_size)


def _there(forward: Forward) -> list[torch.Tensor]:
    return [tensor for tensor in forward if tensor is not None]


def _not_recorded(batch: FlatBatch) -> bool:
    """Whether the batch has inputs that a graph lacks: prompt tokens, LoRA weights or cross-attention inputs."""
    return any(
        prompt is not None
        and (start < len(prompt.token_ids) or prompt.adapter is not None or prompt.cross_inputs is not None)
        for prompt, start, _ in batch.prompts
    )


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then every 8th up to 64, then every 16th, and `most` last: little padding, few graphs."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, most + 1, 16), most}
    return sorted(size for size in sizes if size <= most)


def recorded_decodes(model: AutoregressiveModel, store: KVStore, longest: int, max_batch: int) -> DecodeGraphs | None:
    """CUDA graphs of steps of up to `max_batch` sequences; None if the model cannot be captured. Raises
    `torch.OutOfMemoryError`."""
    capture = capture_on(store.device) if store.device.type == "cuda" else None
    graphs = DecodeGraphs(model, store, longest, capture or run_again, padded=True)
    for size in reversed(batch_sizes(max_batch)):
        try:
            graphs.add(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # torch has no narrower class for a failed capture
            logger.warning("decode steps run without CUDA graphs: capturing %d rows failed", size, exc_info=True)
            return None
    return graphs


def recorded_lists(model: AutoregressiveModel, store: KVStore, longest: int, max_batch: int) -> DecodeGraphs | None:
    """Captured lists of calls on a CPU; None if the model cannot be captured."""
    recordable = isinstance(model, Recordable) and model.recordable
    capture = capture_on(store.device) if recordable else None
    if capture is None:
        return None
    graphs = DecodeGraphs(model, store, longest, capture, padded=False, later=max_batch)
    began = time.monotonic()
    try:
        for size in range(1, min(_FIRST, max_batch) + 1):
            graphs.try_on(size)
            if time.monotonic() - began > SECONDS:
                break
    except NotRecordable as error:
        logger.info("decode steps run uncaptured: %s", error, exc_info=error.__cause__)
        return None
    return graphs
