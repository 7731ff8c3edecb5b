"""Decode steps from recordings: a step of single tokens is launched as one piece, whatever the number of kernels in it.

A recording (a CUDA graph; on a CPU a list of calls, `segue.kernels.recording`) has fixed addresses and shapes. So there
is one per batch size of a short list, over tensors that live as long as it does. On a GPU a step is copied into those
of the next larger size and padded with rows that see one token of a block that belongs to nobody; they are captured at
the start, never while requests wait. On a CPU, where every row costs, a step runs at its own size: the smallest are
recorded at the start, which shows whether the model can be, others when they come for the third time, which takes about
three times as long as a step.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter, FlatBatch, Recordable
from segue.kernels.kv_store import KVStore
from segue.kernels.native import library
from segue.kernels.native_attention import NativeAttention
from segue.kernels.paged_step import HybridStep, PagedStep
from segue.kernels.recorder import record
from segue.kernels.recording import NotRecordable, TooLarge
from segue.kernels.step_tables import StepTables

logger = logging.getLogger(__name__)

USES = 3
"""The step of a size that has it recorded, on a CPU."""
ARENA_BYTES = 64 << 20
"""There, for what is computed within a step, by all recordings; of a step that needs more, Python is little."""
_FIRST = 8
"""Sizes up to this are recorded at the start, one after the other, until that has taken `SECONDS`."""
SECONDS = 2.0
_SMALL = 2
"""Sizes up to this are tried in more ways."""

Forward = tuple[torch.Tensor, torch.Tensor | None]
"""(final hidden states [rows, H], captured rows [rows, width] or None)"""
Capture = Callable[[Callable[[], Forward]], tuple[Callable[[], None], Forward]]
"""Records a function: (what runs it again, the tensors it writes to)."""


def cuda_capture(device: torch.device) -> Capture:
    """Records on `device`; all graphs share one pool of memory, since never two of them run at once, and one stream:
    each further one would keep a workspace of cuBLAS for good."""
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream(device)

    def capture(run: Callable[[], Forward]) -> tuple[Callable[[], None], Forward]:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are compiled and libraries set up outside the recording
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may go on meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
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

    token_ids: torch.Tensor
    embeds: torch.Tensor
    positions: torch.Tensor
    groups: list[PagedStep]
    batch: FlatBatch
    """Over these."""
    replay: Callable[[], None]
    result: Forward


class DecodeGraphs:
    """Runs steps in which every sequence has a single token."""

    def __init__(
        self,
        adapter: AutoregressiveAdapter,
        store: KVStore,
        longest: int,
        capture: Capture,
        *,
        padded: bool,
        later: int = 0,
    ) -> None:
        """`store` has one block more than its pool gives out: the last. `longest`: tokens of the longest sequence.
        `padded`: steps run at the next larger size that is recorded; else at their own or not at all. `later`: sizes up
        to this are recorded when they come.
        """
        self._adapter = adapter
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
        """By name, of as many rows as there may be: those of all sizes that are recorded when they come."""
        self._came: Counter[int] = Counter()
        """Steps of sizes that are not recorded."""

    def add(self, size: int) -> None:
        """Record a step of `size` sequences; on a GPU the largest first. Raises what the model raises: a decoder that
        looks at values on the host cannot be recorded."""
        self._recorded[size] = self._record(size)
        bisect.insort(self._sizes, size)

    @torch.inference_mode()
    def faithful(self, size: int, trials: int) -> bool:
        """Whether a recording gives, to the bit, what the decoder gives on other values than it was recorded with:
        rows, lengths and positions drawn at random; where there are more `trials`, first and last positions in a row,
        too (the library looks for these)."""
        recorded = self._recorded[size]
        device, last = self._store.device, self._longest - 1
        generator = torch.Generator(device).manual_seed(size)
        length = min(self._longest, self._store.block_size)
        in_a_row = torch.arange(size, device=device).clamp(max=last)
        drawn = torch.empty_like(recorded.positions).random_(0, self._longest, generator=generator)
        for positions in [drawn, in_a_row, last - in_a_row.flip(0)][:trials]:
            recorded.token_ids.random_(0, self._adapter.vocab_size, generator=generator)
            recorded.embeds.normal_(generator=generator)
            recorded.positions.copy_(positions)
            for group in recorded.groups:
                group.tables.lengths.random_(1, length + 1, generator=generator)
                group.slots.copy_(group.tables.lengths - 1 + self._scratch * self._store.block_size)
            self._store.scrub([self._scratch])
            expected = [tensor.clone() for tensor in _there(self._adapter.forward(recorded.embeds, recorded.batch))]
            self._store.scrub([self._scratch])
            recorded.replay()
            made = _there(recorded.result)
            if not all(map(torch.equal, made, expected)):
                return False
        return True

    def run(self, embeds: torch.Tensor, batch: FlatBatch) -> Forward | None:
        """What `adapter.forward` gives (hidden states: valid until the next call); None where the step has more
        than one token of a sequence, prompts with extras, adapters, or too many sequences."""
        attention: PagedStep | HybridStep = batch.attention
        groups = attention.groups if isinstance(attention, HybridStep) else [attention]
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
        # hidden states are used up within the step; captured rows go on to others, who keep them
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
                logger.info("decode steps of further sizes run without recordings: %s", error, exc_info=error.__cause__)
        return self._recorded.get(count)

    def try_on(self, size: int) -> None:
        """Record a step of `size` sequences, and try it on other values: a decoder that branches on what it is given
        must not be played back. Raises `NotRecordable`."""
        faithful = False
        try:
            self.add(size)
            faithful = self.faithful(size, trials=3 if size <= _SMALL else 1)
        except NotRecordable:
            raise
        # any kind: the library's code ran before, but not while its operators are watched, and what it or they raise
        # then is of no one class; steps run as they did
        except Exception as error:
            raise NotRecordable(f"{type(error).__name__}: {error}") from error
        finally:
            if not faithful:
                self._recorded.pop(size, None)
        if not faithful:
            raise NotRecordable(f"{size} rows give something else when played back")

    def _record(self, size: int) -> _Recorded:
        adapter = self._adapter
        device = self._store.device
        ids = torch.zeros(size, dtype=torch.long, device=device)
        embeds = self._input(
            "embeds", size, lambda rows: adapter.embed(torch.zeros(rows, dtype=torch.long, device=device), None).clone()
        )
        positions = torch.zeros(adapter.axes, size, dtype=torch.long, device=device)
        groups = [self._fixed(size, group) for group in range(self._store.layout.groups)]
        attention = groups[0] if len(groups) == 1 else HybridStep(groups, self._store.layout.group_of)
        batch = FlatBatch(ids, None, positions, attention, [(None, 0, 1)] * size)
        replay, result = self._capture(lambda: adapter.forward(embeds, batch))
        return _Recorded(ids, embeds, positions, groups, batch, replay, result)

    def _input(self, name: str, size: int, made: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """[size, …], what a step is copied into. Recordings that are made when they come share it, as no two of them
        run at once: one for each size would take memory that nobody counted."""
        if not self._later:
            return made(size)
        if name not in self._inputs:
            self._inputs[name] = made(self._later)
        return self._inputs[name][:size]

    def _fixed(self, size: int, group: int) -> PagedStep:
        """A step of `size` rows that all see the first token of the block of nobody."""
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
        # rows behind the last keep what an earlier step left: it must not be written to
        own.lengths[count:].fill_(1)
        own.blocks[count:, 0].fill_(self._scratch)
        fixed.slots[count:].fill_(self._scratch * self._store.block_size)


def _there(forward: Forward) -> list[torch.Tensor]:
    return [tensor for tensor in forward if tensor is not None]


def _not_recorded(batch: FlatBatch) -> bool:
    """What goes along with a prompt's tokens is not in the recording, nor are weights of a sequence's own."""
    return any(
        prompt is not None
        and (start < len(prompt.token_ids) or prompt.adapter is not None or prompt.beside is not None)
        for prompt, start, _ in batch.prompts
    )


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then every eighth up to 64, then every sixteenth, `most` the last: little padding, few recordings."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, most + 1, 16), most}
    return sorted(size for size in sizes if size <= most)


def recorded_decodes(
    adapter: AutoregressiveAdapter, store: KVStore, longest: int, max_batch: int
) -> DecodeGraphs | None:
    """CUDA graphs of steps of up to `max_batch` sequences; None where the model cannot be recorded. Raises
    `torch.OutOfMemoryError`."""
    capture = cuda_capture(store.device) if store.device.type == "cuda" else run_again
    graphs = DecodeGraphs(adapter, store, longest, capture, padded=True)
    for size in reversed(batch_sizes(max_batch)):
        try:
            graphs.add(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # torch has no other for what cannot be recorded
            logger.warning("decode steps run without CUDA graphs: %d rows cannot be recorded", size, exc_info=True)
            return None
    return graphs


def recorded_lists(adapter: AutoregressiveAdapter, store: KVStore, longest: int, max_batch: int) -> DecodeGraphs | None:
    """Recordings on a CPU; None where the model cannot be recorded."""
    compiled = library()
    recordable = isinstance(adapter, Recordable) and adapter.recordable
    if compiled is None or not recordable or not isinstance(store.backend, NativeAttention):
        return None
    arena = torch.empty(ARENA_BYTES, dtype=torch.uint8)  # memory that is not touched is not taken

    def capture(run: Callable[[], Forward]) -> tuple[Callable[[], None], Forward]:
        recording, _ = record(compiled, run, arena)
        return recording, recording.result

    graphs = DecodeGraphs(adapter, store, longest, capture, padded=False, later=max_batch)
    began = time.monotonic()
    try:
        for size in range(1, min(_FIRST, max_batch) + 1):
            graphs.try_on(size)
            if time.monotonic() - began > SECONDS:
                break
    except NotRecordable as error:
        logger.info("decode steps run without recordings: %s", error, exc_info=error.__cause__)
        return None
    return graphs
