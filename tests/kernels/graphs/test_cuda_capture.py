"""A failed capture leaves the thread's stream and PyTorch's modes as they were: on a stand-in for `torch.cuda`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from segue.kernels.graphs.cuda_capture import CudaCapture

DEVICE = torch.device("cuda:0")


class Stream:
    def __init__(self, name: object) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    def replay(self) -> None:
        pass


class Cuda:
    """As `torch.cuda` behaves: a synchronisation warns in the debug mode, and invalidates a capture; `graph` restores
    the stream only after a `capture_end` that succeeds."""

    def __init__(self) -> None:
        self.first = self.current = Stream("first")
        self.mode = 0
        self.capturing = self.invalid = False
        self.captures = 0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        given = {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": lambda device: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": self.on,
            "graph": self.graph,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", {"warn": 1}.get(mode, mode)),
        }
        for name, value in given.items():
            patch.setattr(torch.cuda, name, value)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Graph, *, stream: Stream, **options: object) -> Iterator[None]:
        before, self.current = self.current, stream
        self.capturing, self.captures = True, self.captures + 1
        try:
            yield
        finally:
            self.capturing = False
            if self.invalid:
                raise RuntimeError("capture_end: operation failed due to a previous error during capture")
            self.current = before

    def synchronise(self) -> None:
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation (of a test)", stacklevel=2)
        if self.capturing:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    made.patch(monkeypatch)
    return made


def left_as_it_was(cuda: Cuda) -> bool:
    return cuda.current is cuda.first and cuda.mode == 0


def test_a_function_that_waits_is_never_captured(cuda: Cuda) -> None:
    shown = warnings.showwarning
    with pytest.raises(RuntimeError, match="it waits for the device"):
        CudaCapture(DEVICE)(cuda.synchronise)
    assert cuda.captures == 0
    assert left_as_it_was(cuda)
    assert warnings.showwarning is shown


def test_a_failed_capture_restores_the_stream(cuda: Cuda) -> None:
    def run() -> None:
        if cuda.capturing:
            cuda.synchronise()

    with pytest.raises(RuntimeError, match="capture_end"):
        CudaCapture(DEVICE)(run)
    assert cuda.captures == 1
    assert left_as_it_was(cuda)


def test_other_threads_may_wait_and_the_first_run_too(cuda: Cuda) -> None:
    runs = 0
    failures: list[Exception] = []

    def elsewhere() -> None:
        try:
            cuda.synchronise()
        except Exception as error:
            failures.append(error)

    def run() -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            cuda.synchronise()  # a library is set up
        if not cuda.capturing:
            other = threading.Thread(target=elsewhere)
            other.start()
            other.join()
        return runs

    replay, result = CudaCapture(DEVICE)(run)
    assert replay is not None
    assert result == 3, "the captured run"
    assert failures == []
    assert left_as_it_was(cuda)
