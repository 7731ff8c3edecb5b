"""Recordings of decode steps and of network calls, as `segue.kernels.graphs.replay` asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from segue.kernels.cpu.arena import ALIGNED
from segue.kernels.cpu.native import Library
from segue.kernels.cpu.recorder import record
from segue.kernels.graphs.cuda_capture import leaves
from segue.kernels.graphs.replay import Call, Capture, NotRecordable, Recorded, TooLarge, copied

ARENA_BYTES = 64 << 20
"""Arena for inputs, intermediates and results of recorded calls; larger calls spend little time in Python."""
MOST = 64
"""Most recordings: each is only a list of calls."""
_SAME = 1e-4
"""Tolerance of results: largest difference over largest value."""


def list_capture(compiled: Library) -> Capture:
    """Captures functions as lists of calls, whose scratch memory is one arena."""
    arena = torch.empty(ARENA_BYTES, dtype=torch.uint8)  # the system commits memory only when it is touched

    def capture(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        recording, _ = record(compiled, run, arena)
        return recording, recording.result

    return capture


class CpuRecorder:
    """Records on a CPU; all recordings share one arena, which starts with their inputs. A network that reads a tensor's
    value on the host is refused. Reads through raw addresses are invisible, so each recording is verified on other
    values, which takes two more calls."""

    held_bytes = ARENA_BYTES
    most = MOST

    def __init__(self, compiled: Library) -> None:
        self._compiled = compiled
        self._arena = torch.empty(ARENA_BYTES, dtype=torch.uint8)  # the system commits memory only when it is touched

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        return run(), 0  # `record` measures it

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        begins = list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in given), initial=0))
        if begins[-1] > self._arena.nbytes:
            raise TooLarge(f"its inputs take {begins[-1]} bytes", call(given))
        inputs = [_placed(tensor, self._arena[begin:]) for tensor, begin in zip(given, begins, strict=False)]
        recording, made = record(self._compiled, partial(call, inputs), self._arena[begins[-1] :], branches=False)
        made = copied(made)  # results may alias inputs
        recorded = Recorded(inputs, recording, recording.result)
        others = list(map(_other, given))
        if not _alike(recorded(others), call(others)):
            raise NotRecordable("a replay on other values gives a different result")
        return recorded, made


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Other values of the same dtype: indices stay valid, because they get no larger; true becomes false."""
    if tensor.dtype == torch.bool:
        return ~tensor
    return tensor / 2 if tensor.is_floating_point() or tensor.is_complex() else tensor // 2


def _placed(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor at the start of `memory`, uint8."""
    placed = memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, torch.empty_like(tensor).stride())
    return placed.copy_(tensor)


def _alike(one: Any, other: Any) -> bool:
    """Whether the tensors of two values of one structure are equal up to rounding; NaN (of a fully masked row) equals
    NaN."""
    return all(
        _close(first, second)
        for first, second in zip(leaves(one, torch.Tensor), leaves(other, torch.Tensor), strict=True)
        if first.numel()
    )


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    if second.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    if not second.is_floating_point():
        return torch.equal(first, second)
    most = second.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return torch.allclose(first, second, rtol=0.0, atol=_SAME * float(most), equal_nan=True)
