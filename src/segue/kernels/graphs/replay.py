"""Replays calls of a network from captured graphs (CUDA graphs, or on a CPU lists of calls by
`segue.kernels.cpu.recorder`): one launch per call, whatever its number of kernels. `replayer_on` and `capture_on`
choose by device.

A captured graph has fixed addresses and shapes, so there is one per kind of call: shapes and dtypes of all tensors,
values of everything else. The first calls of a kind run normally; from the third on (a request of few steps is not
worth a graph) the call's tensors are copied into the graph's and it is replayed. Graphs are bounded in number and in
memory: a call that holds much memory has kernels so large that launching them takes negligible time, and its graph
would hold that memory permanently. A call with arguments other than tensors and plain values is not captured, because
they may hide state that changes.

A network that reads tensor values on the host cannot be captured: its calls run normally, and a line is logged.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.graphs.cuda_capture import CudaCapture, Outside, mapped

USES = 3
"""The n-th call of a kind is captured."""
MOST = 16
"""Most captured graphs of a network at one time; the least recently used one is dropped first."""
HELD_BYTES = 256 << 20
"""A call that holds more than this besides its inputs is not captured."""

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Immutable types whose equality is exact."""

_log = logging.getLogger("segue.graphs")
T = TypeVar("T")


class NotRecordable(Exception):
    """A function cannot be replayed; the message says why."""


class TooLarge(NotRecordable):
    """A function's results and intermediates do not fit into the given memory."""

    def __init__(self, message: str, made: Any) -> None:
        """`made`: the function's result."""
        super().__init__(message)
        self.made = made


Capture: TypeAlias = Callable[[Callable[[], T]], tuple[Callable[[], None], T]]
"""Captures a function: (the replay function, the tensors that it writes to)."""
Call: TypeAlias = Callable[[Sequence[torch.Tensor]], Any]
"""Calls a network with the given tensors as its tensor arguments."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A captured network call that is launched as one piece."""

    inputs: Sequence[torch.Tensor]
    run: Callable[[], None]
    made: Any
    """The results that `run` computes from `inputs`; valid until another graph runs."""

    def __call__(self, given: Sequence[torch.Tensor]) -> Any:
        """Replay with other tensors; returns copies that the caller owns."""
        for fixed, tensor in zip(self.inputs, given, strict=True):
            fixed.copy_(tensor)
        self.run()
        return copied(self.made)


class Replayer(Protocol):
    """Makes network calls replayable on a device."""

    held_bytes: int
    """Most memory that all graphs share, not counting the device's allocator."""
    most: int
    """Most captured graphs at one time."""

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """The result of a call, and the peak bytes that it held."""

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        """(the captured call, its result for `given`). Raises `RuntimeError` or `NotRecordable` if the network's calls
        cannot be captured, `TooLarge` if this one cannot."""


class CudaRecorder:
    """Captures on a CUDA device; all graphs share one memory pool."""

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


def replayer_on(device: torch.device) -> Replayer | None:
    """None on a CPU without compiled kernels."""
    if device.type == "cuda":
        return CudaRecorder(device)
    compiled = cpu_kernels()
    return None if compiled is None else compiled.replayer()


def capture_on(device: torch.device) -> Capture[Any] | None:
    """What captures steps over fixed tensors; None on a CPU without compiled kernels. On a CPU it raises
    `NotRecordable` for functions that cannot be replayed, and every capture must be verified."""
    if device.type == "cuda":
        return CudaCapture(device)
    compiled = cpu_kernels()
    return None if compiled is None else compiled.capture()


class Active(Protocol):
    """A capture in progress."""

    def anew(self, function: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Call a function now and in each replay."""


ACTIVE: ContextVar[Active | None] = ContextVar("recording", default=None)


def anew(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """Call a function that reads values on the host. A graph captured on a CPU calls it in each replay; its
    result must then have the same shape."""
    active = ACTIVE.get()
    return function(*given) if active is None else active.anew(function, given)


@dataclass(slots=True)
class _Kind:
    """State of the calls with equal tensor shapes and equal other arguments."""

    uses: int = 0
    large: bool = False
    recorded: Recorded | None = None


class NetworkGraphs:
    """Wraps a network's `forward`."""

    def __init__(self, forward: Callable[..., Any], device: torch.device, replayer: Replayer) -> None:
        self._forward = forward
        self._device = device
        self._replayer = replayer
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._eager = False
        self.held_bytes = replayer.held_bytes
        """Most memory that its graphs share."""

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
        if len(self._kinds) > self._replayer.most:
            self._kinds.popitem(last=False)
        return kind

    def _as_it_is(self, kind: _Kind, args: Any, kwargs: Any) -> Any:
        if kind.uses != USES - 1:
            return self._forward(*args, **kwargs)
        made, held = self._replayer.held(lambda: self._forward(*args, **kwargs))
        kind.large = held > HELD_BYTES
        return made

    def _record(self, kind: _Kind, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        def call(given: Sequence[torch.Tensor]) -> Any:
            own = iter(given)
            own_args, own_kwargs = mapped((args, kwargs), torch.Tensor, lambda _: next(own))
            return self._forward(*own_args, **own_kwargs)

        try:
            kind.recorded, made = self._replayer.record(call, tensors)
        except TooLarge as error:
            kind.large = True
            return copied(error.made)
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


def is_replayed(network: nn.Module) -> bool:
    """Whether calls of equal shapes are replayed from a captured graph, so that fewer distinct shapes are faster."""
    return isinstance(network.forward, NetworkGraphs)


@contextmanager
def launched_one_by_one(networks: Iterable[nn.Module]) -> Iterator[None]:
    """A context within which the networks run eagerly, not from captured graphs, because their hooks must run."""
    with ExitStack() as stack:
        for network in networks:
            if isinstance(network.forward, NetworkGraphs):
                stack.enter_context(network.forward.eager())
        yield


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


def copied(made: Any) -> Any:
    """The same with clones of its tensors."""
    return mapped(made, torch.Tensor, torch.Tensor.clone)
