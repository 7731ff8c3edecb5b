"""Calls of a network as CUDA graphs, or on a CPU as recordings of `segue.kernels.recorder`: launched as one piece,
whatever the number of kernels in them.

Such a graph is a recording of kernels with fixed addresses and shapes. So there is one per kind of call: shapes and
dtypes of all tensors, values of everything else. The first calls of a kind run as they are; from the third on (a
request of few steps is not worth a recording) its tensors are copied into fixed ones and the recording is run. What is
recorded is bounded in number and in memory: a call that holds much has kernels so large that launching them takes no
time that counts, and a recording would hold that memory for good. A call with anything else than tensors and plain
values is not recorded: who knows what is in it, and whether it is the same tomorrow.

A network that looks at values on the host cannot be recorded: it goes on as it is, with a line in the log.
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
from torch.utils._python_dispatch import TorchDispatchMode

from segue.kernels.arena import ALIGNED
from segue.kernels.native import Library
from segue.kernels.recorder import record
from segue.kernels.recording import NotRecordable, TooLarge
from segue.kernels.trees import leaves, mapped

USES = 3
"""The call of a kind that is recorded."""
MOST = 16
"""Recordings of a network at one time; the one that was not used for longest goes first."""
MOST_ON_CPU = 64
"""There each is a list of calls, and no more."""
HELD_BYTES = 256 << 20
"""A call that holds more than this beside its inputs is not recorded."""

ARENA_BYTES = 64 << 20
"""For what a recorded call is given, computes and gives on a CPU; of a larger one, Python is little."""
_SAME = 1e-4
"""Largest difference over largest value."""
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Types of what never changes, and is equal where nothing differs."""

_log = logging.getLogger("segue.graphs")

Call: TypeAlias = Callable[[Sequence[torch.Tensor]], Any]
"""A call of a network with these tensors in it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call of a network that is launched as one piece."""

    inputs: Sequence[torch.Tensor]
    run: Callable[[], None]
    made: Any
    """What `run` makes of the inputs: it is there until another is run."""

    def __call__(self, given: Sequence[torch.Tensor]) -> Any:
        """What the network makes of other tensors: the caller's own."""
        for fixed, tensor in zip(self.inputs, given, strict=True):
            fixed.copy_(tensor)
        self.run()
        return _copied(self.made)


class Recorder(Protocol):
    """What records on a device."""

    held_bytes: int
    """Memory of its own that all recordings share, at most; not what the device's allocator is asked for."""
    most: int
    """Recordings at one time."""

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """The result of a call, and the bytes it held at most."""

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        """(a recording of the call, what it makes of what is `given`). Raises `RuntimeError` or `NotRecordable` where
        calls cannot be recorded, `TooLarge` where this one cannot."""


class Outside(TorchDispatchMode):
    """Within it, tensors are held that operators read and that are not made meanwhile: a network may keep some (rotary
    tables by shape) only for as long as it likes, and a recording reads them where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, torch.Tensor] = {}
        """By address of their memory."""
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in leaves((args, kwargs), torch.Tensor):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made:
                self.tensors.setdefault(address, tensor)
        out = func(*args, **(kwargs or {}))
        made = {tensor.untyped_storage().data_ptr() for tensor in leaves(out, torch.Tensor)}
        self._made |= made - self.tensors.keys()
        return out


class CudaRecorder:
    """Records on a CUDA device; all recordings share one pool of memory, since never two of them run at once."""

    held_bytes = 0
    most = MOST

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # one for all: cuBLAS keeps a workspace for each

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        made = run()
        return made, torch.cuda.max_memory_allocated(self._device) - before

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        inputs = [tensor.clone() for tensor in given]
        run = partial(call, inputs)
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()  # libraries are set up for the stream outside the recording
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph, outside = torch.cuda.CUDAGraph(), Outside()
        # other threads of the worker copy between device and host meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"), outside:
            made = run()

        def replay(held: object = outside.tensors) -> None:
            graph.replay()

        recorded = Recorded(inputs, replay, made)
        return recorded, recorded(given)


class CpuRecorder:
    """Records on a CPU; all recordings share one arena, what they are given at its beginning. What the host looks at is
    not always seen, so the first is tried on other values."""

    held_bytes = ARENA_BYTES
    most = MOST_ON_CPU

    def __init__(self, compiled: Library) -> None:
        self._compiled = compiled
        self._arena = torch.empty(ARENA_BYTES, dtype=torch.uint8)  # memory that is not touched is not taken
        self._tried = False

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        return run(), 0  # it is told by `record`

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        begins = list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in given), initial=0))
        if begins[-1] > self._arena.nbytes:
            raise TooLarge(f"it is given {begins[-1]} bytes", call(given))
        inputs = [_placed(tensor, self._arena[begin:]) for tensor, begin in zip(given, begins, strict=False)]
        recording, made = record(self._compiled, partial(call, inputs), self._arena[begins[-1] :])
        made = _copied(made)  # some of it may be what was given
        recorded = Recorded(inputs, recording, recording.result)
        if not self._tried:
            halves = [tensor / 2 if tensor.is_floating_point() else tensor for tensor in given]
            if not _alike(recorded(halves), call(halves)):
                raise NotRecordable("played back on other values it gives something else")
            self._tried = True
        return recorded, made


def _placed(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A copy at the beginning of `memory`, uint8."""
    placed = memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, torch.empty_like(tensor).stride())
    return placed.copy_(tensor)


@dataclass(slots=True)
class _Kind:
    """Calls with tensors of equal shapes, and all else equal."""

    uses: int = 0
    large: bool = False
    recorded: Recorded | None = None


class NetworkGraphs:
    """Stands in front of a network's `forward`."""

    def __init__(self, forward: Callable[..., Any], device: torch.device, recorder: Recorder) -> None:
        self._forward = forward
        self._device = device
        self._recorder = recorder
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._eager = False
        self.held_bytes = recorder.held_bytes
        """What its recordings share, at most."""

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
        """Within it calls run as they are: what else decides what the network does is not in a recording."""
        before, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = before

    def _kind(self, given: Any, tensors: list[torch.Tensor]) -> _Kind | None:
        """That of a call, and its tensors; None: it is not to be recorded."""
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
        # any kind: the network ran before, but not while its operators are watched, and what is raised then is of no
        # one class
        except Exception as error:
            made = self._forward(*args, **kwargs)  # what is wrong with this one call, it says itself
            _log.warning("calls of the network cannot be recorded, and are launched kernel by kernel: %s", error)
            self._eager = True
            self._kinds.clear()
        return made


def _form(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """All that is no tensor of a value; the tensors in order. Raises `TypeError` for what may change."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (torch.Tensor, tuple(value.shape), value.dtype)
    if type(value) in (list, tuple):
        return (type(value), *(_form(part, tensors) for part in value))
    if type(value) is dict:
        return (dict, *((name, _form(part, tensors)) for name, part in value.items()))
    if type(value) in _VALUES:
        return (type(value), value)
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _copied(made: Any) -> Any:
    return mapped(made, torch.Tensor, torch.Tensor.clone)


def _alike(one: Any, other: Any) -> bool:
    """Whether the tensors of two values, of one form, are equal to rounding."""
    return all(
        bool((first - second).abs().max() <= _SAME * second.abs().max())
        for first, second in zip(leaves(one, torch.Tensor), leaves(other, torch.Tensor), strict=True)
        if first.numel()
    )
