"""Memory of network calls: how many rows fit, which requests can never be served, and reserving it before a call.

The ranks of a divided network exchange data in every layer, so a rank that runs out of memory in the middle leaves the
others waiting for it. Before a call each rank therefore allocates the memory that its rows will need, and frees it: on
a GPU the allocator keeps it for this process, so that no other process on the device can take it in between.

Optional reading: the engine asks `Room` how many rows a call may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from segue.engines.diffusion.contract import DiffusionModel, Row, Sample
from segue.kernels.device import give_back_on, out_of_memory
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import StageFailed, TooLarge

_PIECES = 16
"""Memory is requested in this many pieces, because memory in use may lie between free parts."""


class Reserve:
    """Memory check of one rank. A row takes the stage model's estimate, or on a CUDA device the measured size."""

    def __init__(self, model: DiffusionModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._measured: dict[int, tuple[int, int]] = {}
        """Tokens of a row → (most rows of a call, bytes that it took)."""

    def fits(self, rows: Sequence[Row]) -> bool:
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
        """Context of a call of these rows (or of none), which measures its memory."""
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
            return sum(self._model.row_bytes(row.sample) for row in rows)
        most, size = self._measured[sample.tokens]
        return size * len(rows) // most


_ROUND = 32
"""Suggested sizes are multiples of this many pixels."""


class Room:
    """A stage's memory besides its weights, and the part of it that rows take.

    A row takes the stage model's estimate, or on a CUDA device the measured size.
    """

    def __init__(self, model: DiffusionModel, memory_bytes: int | None) -> None:
        self._model = model
        room = None if memory_bytes is None else memory_bytes - model.weight_bytes
        self._bytes = room if room is None or room > 0 else None
        """None: unknown (a share that does not even hold the weights was not measured for this model)."""
        self._measured: dict[int, int] = {}
        """Tokens of a row → bytes that a call of one row took."""
        self._most: dict[int, int] = {}
        """Tokens of a row → most rows to try after a larger call did not fit."""
        self._done: dict[int, DiffusionParams] = {}
        """Tokens of a row → its request's parameters, for the largest row that fitted."""

    def measure(self, sample: Sample, call: Callable[[int], float]) -> None:
        """On a CUDA device, run a call of one row of `sample` and record its memory."""
        device = sample.latents.device
        if device.type != "cuda":
            return
        call(1)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call(1)
        self._measured[sample.tokens] = torch.cuda.max_memory_allocated(device) - before

    def needed(self, sample: Sample) -> int:
        """Bytes of one row of a call; 0 if unknown. Interpolated linearly between the smallest and the largest measured
        row, else the stage model's estimate."""
        if len(self._measured) < 2:
            return self._model.row_bytes(sample)
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
        """Record that a call of `rows` rows did not fit, and free the memory left behind by earlier calls."""
        give_back_on(sample.latents.device)
        self._most[sample.tokens] = max(1, min(self._most.get(sample.tokens, rows), rows // 2))

    def fitted(self, sample: Sample) -> None:
        """Record that a row of this sample fitted."""
        if sample.tokens > max(self._done, default=0):
            self._done = {sample.tokens: sample.params}

    def failure(self, sample: Sample) -> StageFailed:
        """The error of a sample that ran out of memory, although it should fit."""
        known = [_asked(params) for tokens, params in self._done.items() if tokens < sample.tokens]
        fits = f"; there was memory for {known[0]}" if known else ""
        return StageFailed(
            f"{_asked(sample.params)}: a call of the network over one row of {sample.tokens} latent tokens does not "
            f"fit into the free memory; ask for a smaller size{fits}"
        )

    def refusal(self, sample: Sample) -> TooLarge | None:
        """The error of a sample that can never run here, with a size that could; None if one row of it fits."""
        needed = self.needed(sample)
        if self._bytes is None or needed <= self._bytes:
            return None
        fits = self._fitting(sample, needed, self._bytes)
        if fits is not None:
            right = f"{fits[0]} x {fits[1]} would fit"
        elif (sample.params.num_frames or 1) > 1:
            right = "with this many frames no size would fit, ask for fewer"
        else:
            right = "no size would fit"
        return TooLarge(
            f"{_asked(sample.params)} needs about {needed} bytes for one call of the network; this stage has "
            f"{self._bytes} besides its weights: {right}",
            field="height",
        )

    def _fitting(self, sample: Sample, needed: int, room: int) -> tuple[int, int] | None:
        """Height and width at which a row fits, in about the same proportions; None if no size does."""
        height, width = sample.params.height or 0, sample.params.width or 0
        fixed = self.needed(replace(sample, tokens=sample.given))  # the same at any size
        pixels = height * width * max(0, room - fixed) / max(1, needed - fixed)
        shrink = (pixels / max(1, height * width)) ** 0.5
        short = max(_ROUND, _rounded(min(height, width) * shrink))
        long = _rounded(min(max(height, width) * shrink, pixels / short))
        if long < short:  # for an extreme aspect ratio, the short side is not reduced further
            short = long = _rounded(pixels**0.5)
        if not short:
            return None
        return (long, short) if height >= width else (short, long)


def _rounded(side: float) -> int:
    return int(side) // _ROUND * _ROUND


def _asked(params: DiffusionParams) -> str:
    frames = f" and {params.num_frames} frames" if params.num_frames else ""
    return f"height {params.height} x width {params.width}{frames}"
