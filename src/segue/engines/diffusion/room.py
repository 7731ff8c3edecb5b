"""Memory for a call: how many rows fit, and which request can never be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from segue.engines.diffusion.contract import DiffusionAdapter, Sample
from segue.kernels.memory import give_back_on
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import StageFailed, TooLarge

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
        self._done: dict[int, DiffusionParams] = {}
        """By tokens of a row, what was asked for: of the largest row that there was memory for."""

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
        """A call of so many rows did not fit. What calls before it left behind is given back."""
        give_back_on(sample.latents.device)
        self._most[sample.tokens] = max(1, min(self._most.get(sample.tokens, rows), rows // 2))

    def fitted(self, sample: Sample) -> None:
        """There was memory for a row of this sample."""
        if sample.tokens > max(self._done, default=0):
            self._done = {sample.tokens: sample.params}

    def failure(self, sample: Sample) -> StageFailed:
        """Of a sample that there was no memory for, though it should fit."""
        known = [_asked(params) for tokens, params in self._done.items() if tokens < sample.tokens]
        fits = f"; there was memory for {known[0]}" if known else ""
        return StageFailed(
            f"{_asked(sample.params)}: a call of the network over one row of {sample.tokens} latent tokens does not "
            f"fit into the memory that is free; ask for a smaller size{fits}"
        )

    def refusal(self, sample: Sample) -> TooLarge | None:
        """Why a sample can never run here, with the size that could; None where one row of it fits."""
        needed = self.needed(sample)
        if self._bytes is None or needed <= self._bytes:
            return None
        fits = self._fitting(sample, needed, self._bytes)
        if fits is not None:
            right = f"{fits[0]} x {fits[1]} would fit"
        elif (sample.params.num_frames or 1) > 1:
            right = "with so many frames no size would fit, ask for fewer"
        else:
            right = "no size would fit"
        return TooLarge(
            f"{_asked(sample.params)} needs about {needed} bytes for one call of the network; this stage has "
            f"{self._bytes} beside its weights: {right}",
            field="height",
        )

    def _fitting(self, sample: Sample, needed: int, room: int) -> tuple[int, int] | None:
        """Height and width that a row fits with, in about the same proportions; None where there are none."""
        height, width = sample.params.height or 0, sample.params.width or 0
        fixed = self.needed(replace(sample, tokens=sample.given))  # as much at any size
        pixels = height * width * max(0, room - fixed) / max(1, needed - fixed)
        shrink = (pixels / max(1, height * width)) ** 0.5
        short = max(_ROUND, _rounded(min(height, width) * shrink))
        long = _rounded(min(max(height, width) * shrink, pixels / short))
        if long < short:  # of a very long one, the short side is not shrunk any more
            short = long = _rounded(pixels**0.5)
        if not short:
            return None
        return (long, short) if height >= width else (short, long)


def _rounded(side: float) -> int:
    return int(side) // _ROUND * _ROUND


def _asked(params: DiffusionParams) -> str:
    frames = f" and {params.num_frames} frames" if params.num_frames else ""
    return f"height {params.height} x width {params.width}{frames}"
