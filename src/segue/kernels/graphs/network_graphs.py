"""Replays calls of a network from CUDA graphs, or on a CPU from recordings of `segue.kernels.graphs.recorder`: one
launch per call, whatever its number of kernels.

A recording has fixed addresses and shapes, so there is one per kind of call: shapes and dtypes of all tensors, values
of everything else. The first calls of a kind run normally; from the third on (a request of few steps is not worth a
recording) the call's tensors are copied into the recording's and it is replayed. Recordings are bounded in number and
in memory: a call that holds much memory has kernels so large that launching them takes negligible time, and its
recording would hold that memory permanently. A call with arguments other than tensors and plain values is not
recorded, because they may hide state that changes.

A network that reads tensor values on the host cannot be recorded: its calls stay unrecorded, and a line is logged.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import torch

from segue.kernels.cpu.native import Library
from segue.kernels.graphs.arena import ALIGNED
from segue.kernels.graphs.cuda_capture import CudaCapture, Outside, leaves, mapped
from segue.kernels.graphs.recorder import record
from segue.kernels.graphs.recording import NotRecordable, TooLarge

USES = 3
"""The n-th call of a kind is recorded."""
MOST = 16
"""Most recordings of a network at one time; the least recently used one is dropped first."""
MOST_ON_CPU = 64
"""Most recordings on a CPU, where each is only a list of calls."""
HELD_BYTES = 256 << 20
"""A call that holds more than this besides its inputs is not recorded."""

ARENA_BYTES = 64 << 20
"""Arena for inputs, intermediates and results of recorded calls on a CPU; larger calls spend little time in Python."""
_SAME = 1e-4
"""Tolerance of results: largest difference over largest value."""
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Immutable types whose equality is exact."""

_log = logging.getLogger("segue.graphs")

Call: TypeAlias = Callable[[Sequence[torch.Tensor]], Any]
"""Calls a network with the given tensors as its tensor arguments."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded network call that is launched as one piece."""

    inputs: Sequence[torch.Tensor]
    run: Callable[[], None]
    made: Any
    """The results that `run` computes from `inputs`; valid until another recording runs."""

    def __call__(self, given: Sequence[torch.Tensor]) -> Any:
        """Replay with other tensors; returns copies that the caller owns."""
        for fixed, tensor in zip(self.inputs, given, strict=True):
            fixed.copy_(tensor)
        self.run()
        return _copied(self.made)


class Recorder(Protocol):
    """Records network calls on a device."""

    held_bytes: int
    """Most memory that all recordings share, not counting the device's allocator."""
    most: int
    """Most recordings at one time."""

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """The result of a call, and the peak bytes that it held."""

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        """(a recording of the call, its result for `given`). Raises `RuntimeError` or `NotRecordable` if the network's
        calls cannot be recorded, `TooLarge` if this one cannot."""


class CudaRecorder:
    """Records on a CUDA device; all recordings share one memory pool."""

    held_bytes = 0
    most = MOST

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capture = CudaCapture(device)

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        made = run()
        return made, torch.cuda.max_memory_allocated(self._device) - before

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        inputs = [tensor.clone() for tensor in given]
        outside = Outside()
        again, made = self._capture(partial(call, inputs), outside)

        def replay(held: object = outside.tensors) -> None:
            again()

        recorded = Recorded(inputs, replay, made)
        return recorded, recorded(given)


class CpuRecorder:
    """Records on a CPU; all recordings share one arena, which starts with their inputs. A network that reads a tensor's
    value on the host is refused. Reads through raw addresses are invisible, so each recording is verified on other
    values, which takes two more calls."""

    held_bytes = ARENA_BYTES
    most = MOST_ON_CPU

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
        made = _copied(made)  # results may alias inputs
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


@dataclass(slots=True)
class _Kind:
    """State of the calls with equal tensor shapes and equal other arguments."""

    uses: int = 0
    large: bool = False
    recorded: Recorded | None = None


class NetworkGraphs:
    """Wraps a network's `forward`."""

    def __init__(self, forward: Callable[..., Any], device: torch.device, recorder: Recorder) -> None:
        self._forward = forward
        self._device = device
        self._recorder = recorder
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._eager = False
        self.held_bytes = recorder.held_bytes
        """Most memory that its recordings share."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        kind = None if self._eager else self._kind((args, kwargs), tensors)
        if kind is None:
            return self._forward(*args, **kwargs)
        kind.uses += 1
        if kind.recorded is not None:
            return kind.recorded(tensors)
        if kind.uses < USES or kind.large:
            return self._as_it_is(kind, args, kwargs)
        return self._record(kind, args, kwargs, tensors)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within it no call is replayed, because its behaviour may depend on state outside its arguments."""
        before, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = before

    def _kind(self, given: Any, tensors: list[torch.Tensor]) -> _Kind | None:
        """The kind of a call, whose tensors are appended to `tensors`; None: it must not be recorded."""
        try:
            form = _form(given, tensors)
        except TypeError:
            return None
        if any(tensor.device != self._device for tensor in tensors):
            return None
        kind = self._kinds.setdefault(form, _Kind())
        self._kinds.move_to_end(form)
        if len(self._kinds) > self._recorder.most:
            self._kinds.popitem(last=False)
        return kind

    def _as_it_is(self, kind: _Kind, args: Any, kwargs: Any) -> Any:
        if kind.uses != USES - 1:
            return self._forward(*args, **kwargs)
        made, held = self._recorder.held(lambda: self._forward(*args, **kwargs))
        kind.large = held > HELD_BYTES
        return made

    def _record(self, kind: _Kind, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        def call(given: Sequence[torch.Tensor]) -> Any:
            own = iter(given)
            own_args, own_kwargs = mapped((args, kwargs), torch.Tensor, lambda _: next(own))
            return self._forward(*own_args, **own_kwargs)

        try:
            kind.recorded, made = self._recorder.record(call, tensors)
        except TooLarge as error:
            kind.large = True
            return _copied(error.made)
        # any kind: library code that runs well may raise any class of error while its operators are recorded
        except Exception as error:
            made = self._forward(*args, **kwargs)  # raises the call's own error, if it has one
            _log.warning(
                "calls of the network cannot be recorded and run kernel by kernel: %s",
                error,
                exc_info=not isinstance(error, NotRecordable),
            )
            self._eager = True
            self._kinds.clear()
        return made


def _form(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """A hashable key of all non-tensor parts; appends the tensors in order. Raises `TypeError` for mutable values."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (torch.Tensor, tuple(value.shape), value.dtype)
    if type(value) in (list, tuple):
        return (type(value), *(_form(part, tensors) for part in value))
    if type(value) is dict:
        return (dict, *((name, _form(part, tensors)) for name, part in value.items()))
    if type(value) in _VALUES:
        return (type(value), value)
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def _copied(made: Any) -> Any:
    return mapped(made, torch.Tensor, torch.Tensor.clone)


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
