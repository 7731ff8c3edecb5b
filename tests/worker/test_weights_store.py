"""What the fork server keeps of shared weights: as long as a worker shares them, and whichever of them is killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from shared_net import descriptors

from segue.messages.process import Exited, Kill, Spawn, WorkerSpec, encode, from_fork_server
from segue.worker.process.forkserver import serve
from segue.worker.process.weights_store import WeightsStore, close_all


@pytest.fixture
def store() -> Iterator[WeightsStore]:
    store = WeightsStore()
    yield store
    store.close()


def test_what_was_sent_is_there_for_every_worker_until_the_store_is_closed() -> None:
    """Memory that descriptors keep is a pipe here, whose reader learns when the last one is closed."""
    store = WeightsStore()
    read, write = os.pipe()
    os.set_blocking(read, False)
    before = descriptors() - 1
    if (pid := os.fork()) == 0:
        store.send([7], [write])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(write)
    for _ in range(3):
        sizes, found = store.peek()
        assert sizes == [7]
        os.write(found[0], b".")
        assert not os.get_inheritable(found[0])
        close_all(found)
        assert os.read(read, 9) == b"."
    with pytest.raises(BlockingIOError):
        os.read(read, 9)
    assert descriptors() == before
    store.close()
    assert os.read(read, 9) == b"", "the kernel has closed it"
    os.close(read)


def test_who_begins_finds_nothing_of_the_worker_before(store: WeightsStore) -> None:
    store.begin(b"a long index of the worker before")
    for size in (1, 2):
        store.send([size], [store.memfd])
    store.begin(b"index")
    assert store.index == b"index"
    with pytest.raises(BlockingIOError):
        store.peek()
    store.send([3], [store.memfd])
    store.seal()
    sizes, found = store.peek()
    close_all(found)
    assert sizes == [3]
    with pytest.raises(PermissionError):
        store.begin(b"another")


def test_a_worker_that_may_not_have_so_many_descriptors_has_none(store: WeightsStore) -> None:
    store.send([1] * 4, [store.memfd] * 4)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, taken = descriptors(), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, limit[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(store.memfd))
        close_all([taken.pop(), taken.pop()])
        with pytest.raises(OSError, match="as many file descriptors") as caught:
            store.peek()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        close_all(taken)
    assert caught.value.errno == errno.EMFILE
    assert descriptors() == before
    sizes, found = store.peek()
    close_all(found)
    assert len(sizes) == len(found) == 4


def memfds() -> int:
    """How many memfds of weights this process has."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            found += "segue-weights" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


class ForkServer:
    """A fork server whose workers say which stores they have, and wait to be killed."""

    def __init__(self) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._said, said = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pids: dict[str, int] = {}

        def run(spec: WorkerSpec, weights: Mapping[str, WeightsStore]) -> None:
            found = sorted(f"{stage} {os.fstat(store.memfd).st_ino}" for stage, store in weights.items())
            said.send("\n".join([str(memfds()), *found]).encode())
            signal.pause()

        self._pid = os.fork()
        if self._pid == 0:
            self._control.close()
            serve(control, "/nonexistent", [], lambda: None, run, lambda: "")
            os._exit(0)
        control.close()
        self._said_there = said
        self._hear()

    def start(self, name: str, shared: dict[str, str]) -> tuple[int, list[str]]:
        """Return how many memfds of weights the worker has, and its stages with the memfd of each."""
        spec = WorkerSpec(
            worker=name,
            replica=0,
            family="",
            model_dir="",
            stages=[],
            edges=[],
            replayable=[],
            limits={},
            inbox="",
            orchestrator="",
            connector="",
            shared=shared,
        )
        self._control.send(encode(Spawn(spec=spec)))
        self._pids[name] = self._hear().pid
        opened, *found = self._said.recv(1 << 16).decode().splitlines()
        return int(opened), found

    def kill(self, name: str) -> None:
        """Return when it has ended."""
        self._control.send(encode(Kill(pid=self._pids[name])))
        ended = self._hear()
        assert isinstance(ended, Exited)
        assert ended.worker == name

    def close(self) -> None:
        for end in (self._control, self._said, self._said_there):
            end.close()
        os.waitpid(self._pid, 0)

    def _hear(self) -> Any:
        return from_fork_server.decode(self._control.recv(1 << 16))


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def test_workers_of_a_stage_on_a_device_have_one_store_while_any_of_them_lives(forks: ForkServer) -> None:
    one = forks.start("a.0", {"a": "cuda:0", "b": "cuda:0"})
    assert one[0] == len(one[1]) == 2
    assert forks.start("a.1", {"a": "cuda:0", "b": "cuda:0"}) == one
    other = forks.start("a.2", {"a": "cuda:1"})
    assert other[0] == 1, "and no other stage's, nor other device's"
    assert not set(other[1]) & set(one[1])
    assert forks.start("c.0", {}) == (0, [])
    forks.kill("a.0")
    assert forks.start("a.0", {"a": "cuda:0", "b": "cuda:0"}) == one
    forks.kill("a.0")
    forks.kill("a.1")
    anew = forks.start("a.1", {"a": "cuda:0", "b": "cuda:0"})
    assert anew[0] == 2, "the fork server keeps none that no worker shares"
    assert not set(anew[1]) & set(one[1])
    assert forks.start("a.3", {"a": "cuda:1"}) == other
