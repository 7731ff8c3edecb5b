"""Decode steps from recordings: a step of single tokens is launched as one piece, whatever the number of kernels in it.

A recording (a CUDA graph; on a CPU a list of calls, `segue.kernels.recording`) has fixed addresses and shapes. So there
is one per batch size of a short list, over tensors that live as long as it does. On a GPU a step is copied into those
of the next larger size and padded with rows that see one token of a block that belongs to nobody; on a CPU, where every
row costs, steps of other sizes run as they are. Captured at the start, never while requests wait.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter, FlatBatch, Recordable
from segue.kernels.kv_store import KVStore
from segue.kernels.native import library
from segue.kernels.native_attention import NativeAttention
from segue.kernels.paged_step import HybridStep, PagedStep
from segue.kernels.recorder import record
from segue.kernels.recording import NotRecordable
from segue.kernels.step_tables import StepTables

logger = logging.getLogger(__name__)

SECONDS = 4.0
"""On a CPU no further size is recorded after so long: a large model must start too, and has little to gain."""
MOST_BYTES = 256 << 20
"""On a CPU no further size is recorded either when those before keep so much of what they compute in between."""

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
    ) -> None:
        """`store` has one block more than its pool gives out: the last. `longest`: tokens of the longest sequence.
        `padded`: steps run at the next larger size that is recorded; else at their own or not at all.
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
        recorded = self._recorded_for(count)
        if recorded is None or not single or _not_recorded(batch):
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

    def _record(self, size: int) -> _Recorded:
        adapter = self._adapter
        device = self._store.device
        ids = torch.zeros(size, dtype=torch.long, device=device)
        embeds = adapter.embed(ids, None).clone()
        positions = torch.zeros(adapter.axes, size, dtype=torch.long, device=device)
        groups = [self._fixed(size) for _ in range(self._store.layout.groups)]
        attention = groups[0] if len(groups) == 1 else HybridStep(groups, self._store.layout.group_of)
        batch = FlatBatch(ids, None, positions, attention, [(None, 0, 1)] * size)
        replay, result = self._capture(lambda: adapter.forward(embeds, batch))
        return _Recorded(ids, embeds, positions, groups, batch, replay, result)

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
    """Recordings on a CPU, of as many sizes as there is time for; None where the model cannot be recorded.

    Each is tried on other values: a decoder that branches on what it is given must not be played back.
    """
    compiled = library()
    recordable = isinstance(adapter, Recordable) and adapter.recordable
    if compiled is None or not recordable or not isinstance(store.backend, NativeAttention):
        return None
    taken = 0

    def capture(run: Callable[[], Forward]) -> tuple[Callable[[], None], Forward]:
        nonlocal taken
        recording, _ = record(compiled, run)
        taken += recording.nbytes
        return recording, recording.result

    graphs = DecodeGraphs(adapter, store, longest, capture, padded=False)
    began = time.monotonic()
    for size in _by_use(max_batch):
        try:
            graphs.add(size)
            faithful = graphs.faithful(size, trials=3 if size <= 2 else 1)
        except NotRecordable as error:
            logger.info("decode steps run without recordings: %s", error)
            return None
        # any kind: the library's code ran before, but not while its operators are watched, and what it or they raise
        # then is of no one class; no request waits, and steps run as they did in the warm-up
        except Exception:
            logger.warning("decode steps run without recordings", exc_info=True)
            return None
        if not faithful:
            logger.info("decode steps run without recordings: %d rows give something else when played back", size)
            return None
        if time.monotonic() - began > SECONDS or taken > MOST_BYTES:
            break
    return graphs


def _by_use(max_batch: int) -> list[int]:
    """The usual ones first: powers of two and the largest; then all others up to 8, where Python is most of what is
    spent beside reading weights; then those of a GPU."""
    powers = [1 << power for power in range(max_batch.bit_length())]
    sizes = dict.fromkeys([*powers, max_batch, *range(1, 9), *range(10, 17, 2), *batch_sizes(max_batch)])
    return [size for size in sizes if size <= max_batch]
