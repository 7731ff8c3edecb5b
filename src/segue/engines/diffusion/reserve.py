"""Memory for a call, had before the call begins.

The ranks of a divided network exchange in every layer, so one that runs out of memory in the middle leaves the others
waiting for it. Before a call each rank therefore asks its allocator for what its rows will need, and gives it back: on
a GPU the allocator keeps it for this process, so that nobody else on the device can have it in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from segue.engines.diffusion.contract import DiffusionAdapter, Row
from segue.kernels.memory import out_of_memory

_PIECES = 16
"""What is asked for is asked for in so many pieces: what is still in use may lie between them."""


class Reserve:
    """Of one rank. A row takes what the adapter says; on a CUDA device, what it was measured to take."""

    def __init__(self, adapter: DiffusionAdapter, device: torch.device) -> None:
        self._adapter = adapter
        self._device = device
        self._measured: dict[int, tuple[int, int]] = {}
        """By tokens of a row: most rows of a call, and bytes that it took."""

    def had(self, rows: Sequence[Row]) -> bool:
        """Whether there is memory for a call of these rows now."""
        needed = self._needed(rows)
        pieces = [needed // _PIECES] * (_PIECES if needed >= _PIECES else 0)
        try:
            kept = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in pieces]
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return False
        del kept
        return True

    @contextmanager
    def measured(self, rows: Sequence[Row]) -> Iterator[None]:
        """Around a call of these rows, or of none."""
        tokens = rows[0].sample.tokens if rows else 0
        if self._device.type != "cuda" or len(rows) <= self._measured.get(tokens, (0, 0))[0]:
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self._measured[tokens] = len(rows), torch.cuda.max_memory_allocated(self._device) - before

    def _needed(self, rows: Sequence[Row]) -> int:
        if not rows:
            return 0
        sample = rows[0].sample
        if sample.tokens not in self._measured:
            return sum(self._adapter.row_bytes(row.sample) for row in rows)
        most, size = self._measured[sample.tokens]
        return size * len(rows) // most
