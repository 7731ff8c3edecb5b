"""Workers of a stage share their weights: what is equal is mapped, and nothing else changes. In a memfd as on a CPU, in
chunks as on a GPU over a driver of memfds, and on a GPU where there is one."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from shared_net import IDS, WEIGHTS, WIDE, HostCuda, Net, OnHost, descriptors, net, places
from torch import nn

from segue.worker.process.cuda_weights import cuda_weights
from segue.worker.process.host_weights import HostWeights
from segue.worker.process.shared_weights import LEAST_BYTES, Memory, load_shared, share
from segue.worker.process.weights_store import WeightsStore

KINDS = ["memfd", "chunks"]
CUDA = pytest.param(
    "cuda:0",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
everywhere = pytest.mark.parametrize("kind", [*KINDS, CUDA])
on_host = pytest.mark.parametrize("kind", KINDS)
in_a_memfd = pytest.mark.parametrize("kind", KINDS[:1])


@dataclass
class Stage:
    """A stage on one device, whose workers are networks of this process or of forks."""

    kind: str
    store: WeightsStore = field(default_factory=WeightsStore)

    @property
    def device(self) -> str:
        return self.kind if self.kind.startswith("cuda") else "cpu"

    def memory(self) -> Memory:
        if self.kind == "memfd":
            return HostWeights(self.store)
        if self.kind == "chunks":
            return OnHost(self.store, HostCuda())
        found = cuda_weights(self.store, torch.device(self.kind))
        assert found is not None
        return found

    def net(self, seed: int = 0) -> Net:
        return net(seed, self.device)

    def answer(self, network: nn.Module) -> torch.Tensor:
        return network(IDS.to(self.device))

    def share(self, network: nn.Module, older: Iterable[nn.Module] = ()) -> int:
        with self.store.locked():
            return share(self.store, self.memory(), network.modules(), older)


@pytest.fixture
def stage(kind: str) -> Iterator[Stage]:
    stage = Stage(kind)
    yield stage
    stage.store.close()


def forked(worker: Callable[[], None]) -> int:
    """Run a worker in a fork until it is killed or has killed itself; return the signal."""
    if (pid := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # those of the pool were not forked
            worker()
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@everywhere
def test_the_first_worker_fills_and_the_next_ones_map(stage: Stage) -> None:
    one, other = stage.net(), stage.net()
    wanted, before = stage.answer(one), descriptors()
    shared = stage.share(one)
    assert WEIGHTS <= shared <= 1.1 * WEIGHTS
    assert stage.share(other) == shared
    for network in (one, other):
        assert network.head.weight is network.table.weight
        assert torch.equal(stage.answer(network), wanted)
    assert one.table.weight.data_ptr() != other.table.weight.data_ptr()
    if stage.device == "cpu":
        assert descriptors() == before
        how = {"memfd": "rw-p /memfd:segue-weights", "chunks": "r--s /memfd:chunk"}[stage.kind]
        for network in (one, other):
            found = places(network)
            assert {name for name in found if found[name] == how} >= {"table.weight", "first.weight", "scale"}
            assert "memfd" not in found["first.bias"], "too small"


@everywhere
def test_only_equal_weights_are_shared(stage: Stage) -> None:
    one, other = stage.net(), stage.net()
    other.table.weight[WIDE // 2 + 8, 3] += 1  # not among the samples of a key
    wanted = stage.answer(other)
    whole = stage.share(one)
    assert stage.share(other) == whole - 4 * WIDE * WIDE
    assert torch.equal(stage.answer(other), wanted)
    assert stage.share(stage.net(1)) == 0


@everywhere
def test_weights_of_older_networks_stay_where_they_are(stage: Stage) -> None:
    """Those of a stage that the worker has built already: it may have captured their addresses."""
    older, newer = stage.net(), stage.net(1)
    newer.table.weight = newer.head.weight = older.table.weight
    place = older.table.weight.data_ptr()
    shared = stage.share(newer, older.modules())
    assert WEIGHTS - 4 * WIDE * WIDE <= shared < WEIGHTS
    assert newer.table.weight.data_ptr() == place


@on_host
def test_the_weights_outlive_the_worker_that_filled_the_store(stage: Stage) -> None:
    first, network = stage.net(), stage.net()

    def worker() -> None:
        stage.share(first)
        die()

    assert forked(worker) == signal.SIGKILL
    assert stage.store.sealed
    wanted = stage.answer(network)
    assert stage.share(network) >= WEIGHTS
    assert torch.equal(stage.answer(network), wanted)


@on_host
@pytest.mark.parametrize("point", ["write", "keep", "seal"])
def test_a_worker_that_dies_while_it_fills_leaves_it_to_the_next(stage: Stage, point: str) -> None:
    """kill -9 in the middle of the weights, when all are there, and when only the seal is missing. Its weights are
    others than those of the next one, which must not find them."""

    first = stage.net(1)

    def worker() -> None:
        memory, count = stage.memory(), iter(range(3))

        def write(data: torch.Tensor, place: int, copy: Callable[[torch.Tensor, int], None] = memory.write) -> None:
            copy(data, place)
            if next(count) == 1:
                die()

        if point == "write":
            memory.write = write  # type: ignore[method-assign]
        elif point == "keep":
            memory.keep = die  # type: ignore[method-assign]
        else:
            stage.store.seal = die  # type: ignore[method-assign]
        with stage.store.locked():
            share(stage.store, memory, first.modules())

    assert forked(worker) == signal.SIGKILL
    assert not stage.store.sealed
    one, other = stage.net(), stage.net()
    wanted = stage.answer(one)
    shared = stage.share(one)
    assert shared >= WEIGHTS
    assert stage.share(other) == shared
    assert torch.equal(stage.answer(other), wanted)
    assert stage.share(stage.net(1)) == 0


@in_a_memfd
def test_the_lock_of_a_worker_that_was_killed_is_free(stage: Stage) -> None:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        with stage.store.locked():
            os.write(write, b".")
            signal.pause()
    os.read(read, 1)
    with pytest.raises(OSError, match="temporarily unavailable"):
        fcntl.lockf(stage.store.memfd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with stage.store.locked():
        pass


@in_a_memfd
def test_who_writes_to_a_weight_has_a_copy(stage: Stage) -> None:
    one, other, third = (stage.net() for _ in range(3))
    stage.share(one)
    stage.share(other)
    one.table.weight.zero_()
    assert other.table.weight.count_nonzero() == WIDE * WIDE
    assert stage.share(third)
    assert torch.equal(third(IDS), other(IDS))
    with pytest.raises(PermissionError):
        os.pwrite(stage.store.memfd, b"\0" * 4096, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(stage.store.memfd, 0)


@in_a_memfd
def test_weights_are_shared_once_and_files_not_at_all(stage: Stage, tmp_path: Path) -> None:
    one = stage.net()
    assert stage.share(one) > 0
    again = Stage(stage.kind)
    assert again.share(one) == 0, "they are mapped already"
    again.store.close()
    path = tmp_path / "weights"
    path.write_bytes(bytes(LEAST_BYTES))
    with open(path, "rb") as file:
        layer = nn.Linear(16, LEAST_BYTES // 64, bias=False).requires_grad_(False)
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    layer.weight.set_(torch.frombuffer(mapped, dtype=torch.float32).view(LEAST_BYTES // 64, 16))
    assert stage.share(layer) == 0


@in_a_memfd
def test_a_memfd_that_cannot_be_filled_changes_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    fcntl.fcntl(stage.store.memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    one = stage.net()
    wanted = one(IDS)
    assert stage.share(one) == 0
    assert "not shared between the workers" in caplog.text
    assert torch.equal(one(IDS), wanted)


@in_a_memfd
def test_a_worker_shares_what_it_loads(stage: Stage) -> None:
    """And only that: no network that it had before."""
    before = stage.net(1)
    one, shared = load_shared(stage.store, torch.device("cpu"), stage.net)
    assert WEIGHTS <= shared <= 1.1 * WEIGHTS
    assert places(one)["table.weight"].endswith("segue-weights")
    assert "memfd" not in places(before)["table.weight"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
@in_a_memfd
def test_without_a_driver_nothing_is_shared(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    one, shared = load_shared(stage.store, torch.device("cuda:0"), stage.net)
    assert shared == 0
    assert "memfd" not in "".join(places(one).values())
    assert "cuda:0" in caplog.text
