"""Captures a function on a CUDA device as a CUDA graph, and leaves the process usable if that fails.

A host synchronisation inside a capture invalidates it. `torch.cuda.graph` then raises from `capture_end()`, before it
restores the current stream, and PyTorch ends neither the redirection of allocations to the pool nor the capture state
of the random number generator. So a run before the capture checks for synchronisations, where they do no damage.

`Outside` keeps alive the tensors that a captured network reads but does not make; `leaves` and `mapped` visit the
values of one type in nested lists, tuples and dictionaries."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


def leaves(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the values of type `kind` in nested containers, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part, kind)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part, kind)


def mapped(value: Any, kind: type[T], made: Callable[[T], Any]) -> Any:
    """Replace the values of type `kind` by `made(value)`, in the order of `leaves`."""
    if isinstance(value, kind):
        return made(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(part, kind, made) for part in value])
    if isinstance(value, dict):
        return {name: mapped(part, kind, made) for name, part in value.items()}
    return value


class Outside(TorchDispatchMode):
    """Within it, holds tensors that operators read but that were made before. A network may free such a tensor (a
    rotary table per shape) at any time, but a captured graph keeps reading its address."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, torch.Tensor] = {}
        """By address of their memory."""
        self._made: set[int] = set()

    def __enter__(self) -> Outside:
        _ACTIVE.set(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _ACTIVE.set(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._read((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self._gave(out)
        return out

    def one_call(self, function: Callable[..., Any], own: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Call a function whose kernels are invisible to torch. It reads its arguments and `own`; memory that it
        allocates and does not return needs no holding."""
        self._read((args, kwargs, own))
        self.__exit__(None, None, None)
        try:
            out = function(*args, **kwargs)
        finally:
            self.__enter__()
        self._gave(out)
        return out

    def _read(self, value: Any) -> None:
        for tensor in leaves(value, torch.Tensor):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made:
                self.tensors.setdefault(address, tensor)

    def _gave(self, value: Any) -> None:
        made = {tensor.untyped_storage().data_ptr() for tensor in leaves(value, torch.Tensor)}
        self._made |= made - self.tensors.keys()


_ACTIVE: ContextVar[Outside | None] = ContextVar("outside", default=None)


def one_call(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a module's compiled `forward` so that `Outside` sees one call instead of the operators of torch in it.
    Otherwise tensors that only compiled kernels read would be freed under a captured graph, and it would hold results
    of compiled kernels as if they came from outside."""

    @wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outside = _ACTIVE.get()
        if outside is None:
            return compiled(*args, **kwargs)
        return outside.one_call(compiled, [*module.parameters(), *module.buffers()], args, kwargs)

    return forward


_SYNCHRONISES = "called a synchronizing CUDA operation"
"""PyTorch's warning in its sync debug mode."""
_Result = TypeVar("_Result")


class CudaCapture:
    """Captures functions on one device. All graphs share one memory pool, since no two of them run at once, and one
    stream, because each further stream would keep a cuBLAS workspace permanently."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)

    def __call__(
        self, run: Callable[[], _Result], during: AbstractContextManager[Any] | None = None
    ) -> tuple[Callable[[], None], _Result]:
        """Return (the replay function, the tensors it writes to). `during`: entered for the captured run only. Raises
        `RuntimeError` if `run` waits for the device, and any error of `run`."""
        before, side = torch.cuda.current_stream(self._device), self._side
        graph = torch.cuda.CUDAGraph()
        try:
            side.wait_stream(before)
            try:
                with torch.cuda.stream(side):
                    run()  # kernels are compiled and libraries set up outside the capture; this may synchronise
                    with _no_host_sync():
                        run()
            finally:
                before.wait_stream(side)
            # thread_local: other threads of the process may use the device during the capture
            capture = torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local")
            with capture, during or nullcontext():
                result = run()
        finally:
            torch.cuda.set_stream(before)
        return graph.replay, result


@contextmanager
def _no_host_sync() -> Iterator[None]:
    """Within it, an operation of this thread that waits for the device raises `RuntimeError`.

    PyTorch's sync debug mode applies to the whole process. Its "error" would fail requests in other threads, which may
    wait; so the mode is "warn", and the warning is raised as an error in this thread alone.
    """
    here, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SYNCHRONISES)
        show = warnings.showwarning

        def raise_here(message: Warning | str, *where: Any, **more: Any) -> None:
            if _SYNCHRONISES not in str(message):
                show(message, *where, **more)
            elif threading.get_ident() == here:
                raise RuntimeError("it waits for the device, which a CUDA graph does not allow")

        warnings.showwarning = raise_here
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
