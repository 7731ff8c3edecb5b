"""Memory for a call: how many rows fit, and which request can never be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from segue.engines.diffusion.contract import DiffusionAdapter, Sample
from segue.messages.errors import TooLarge

_ROUND = 32
"""Pixels that a size offered instead is a multiple of."""


class Room:
    """What a stage has beside its weights, and what rows take of it.

    A row takes what the adapter says; on a CUDA device, what was measured.
    """

    def __init__(self, adapter: DiffusionAdapter, memory_bytes: int | None) -> None:
        self._adapter = adapter
        room = None if memory_bytes is None else memory_bytes - adapter.weight_bytes
        self._bytes = room if room is None or room > 0 else None
        """None: unknown (a share that does not even hold the weights was not measured for this model)."""
        self._measured: dict[int, int] = {}
        """By tokens of a row: bytes that a call of one took."""
        self._most: dict[int, int] = {}
        """By tokens of a row: rows that may fit, where a call of more did not."""

    def measure(self, sample: Sample, call: Callable[[int], float]) -> None:
        """On a CUDA device, make a call of one row of `sample` and note what it takes."""
        device = sample.latents.device
        if device.type != "cuda":
            return
        call(1)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call(1)
        self._measured[sample.tokens] = torch.cuda.max_memory_allocated(device) - before

    def needed(self, sample: Sample) -> int:
        """Bytes of one row of a call; 0 where unknown. On the straight line through the smallest and the largest that
        were measured, else what the adapter says."""
        if len(self._measured) < 2:
            return self._adapter.row_bytes(sample)
        least, most = min(self._measured), max(self._measured)
        slope = (self._measured[most] - self._measured[least]) / (most - least)
        return max(0, int(self._measured[most] + slope * (sample.tokens - most)))

    def rows(self, sample: Sample) -> int:
        """How many rows like this one fit into a call, at least 1."""
        most = self._most.get(sample.tokens, 1 << 30)
        needed = self.needed(sample)
        if self._bytes is None or not needed:
            return most
        return max(1, min(most, self._bytes // needed))

    def too_large(self, sample: Sample, rows: int) -> None:
        """A call of so many rows did not fit."""
        if sample.latents.device.type == "cuda":
            torch.cuda.empty_cache()
        self._most[sample.tokens] = max(1, min(self._most.get(sample.tokens, rows), rows // 2))

    def refusal(self, sample: Sample) -> TooLarge | None:
        """Why a sample can never run here, with the size that could; None where one row of it fits."""
        needed = self.needed(sample)
        if self._bytes is None or needed <= self._bytes:
            return None
        height, width = sample.params.height or 0, sample.params.width or 0
        fixed = self.needed(replace(sample, tokens=0))  # a text, which takes as much at any size
        shrink = (max(0, self._bytes - fixed) / max(1, needed - fixed)) ** 0.5
        fits = [max(_ROUND, int(side * shrink) // _ROUND * _ROUND) for side in (height, width)]
        frames = f" and {sample.params.num_frames} frames" if sample.params.num_frames else ""
        return TooLarge(
            f"height {height} x width {width}{frames} needs about {needed} bytes for one call of the network; this "
            f"stage has {self._bytes} beside its weights: {fits[0]} x {fits[1]} would fit",
            field="height",
        )


def out_of_memory(error: Exception) -> bool:
    """Whether a call failed for lack of memory: CUDA has a class for it, a CPU's allocator only words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
