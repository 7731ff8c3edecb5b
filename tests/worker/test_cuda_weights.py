"""Shared weights in chunks of a CUDA device: how many, when memory is short, and what is asked of the driver, which is
one of memfds here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shared_net import IDS, WEIGHTS, HostCuda, OnHost, descriptors, net, places
from torch import nn

from segue.connectors.device.cuda import Driver
from segue.worker.process.cuda_weights import CudaChunks
from segue.worker.process.shared_weights import LEAST_BYTES, share
from segue.worker.process.weights_store import MOST_DESCRIPTORS, WeightsStore

OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801


@pytest.fixture
def store() -> Iterator[WeightsStore]:
    store = WeightsStore()
    yield store
    store.close()


def shared(store: WeightsStore, network: nn.Module, cuda: HostCuda, chunk_bytes: int = 1 << 18) -> int:
    found = share(store, OnHost(store, cuda, chunk_bytes), network.modules())
    assert not cuda.handles, "each is released"
    assert not cuda.contexts
    return found


def inodes(network: nn.Module) -> set[str]:
    """Those of the memory that its weights are mapped from."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in line[0].split("-")), line[4]) for line in lines if "/memfd:chunk" in line]
    found = network.state_dict(keep_vars=True).values()
    return {inode for start, end, inode in spans for tensor in found if start <= tensor.data_ptr() < end}


def test_a_worker_takes_chunks_and_the_next_one_none(store: WeightsStore) -> None:
    one, other, cuda, more = net(), net(), HostCuda(), HostCuda(room=0)
    whole = shared(store, one, cuda)
    assert cuda.made > 2
    assert cuda.room + whole <= 1 << 40
    assert (1 << 40) - cuda.room <= whole + cuda.UNIT + 512 * 8
    assert shared(store, other, more) == whole
    assert inodes(one) == inodes(other)
    assert len(inodes(one)) > 2
    assert torch.equal(one(IDS), other(IDS))


def test_a_region_larger_than_a_chunk_has_one_of_its_size(store: WeightsStore) -> None:
    one, other, cuda = net(), net(), HostCuda()
    whole = shared(store, one, cuda, chunk_bytes=1)
    assert 2 <= cuda.made <= 5
    assert shared(store, other, HostCuda(room=0)) == whole
    assert torch.equal(one(IDS), other(IDS))


def test_there_are_never_more_chunks_than_a_message_holds(store: WeightsStore) -> None:
    def many() -> nn.ModuleList:
        torch.manual_seed(0)
        size = LEAST_BYTES // 64
        layers = (nn.Linear(16, size, bias=False).requires_grad_(False) for _ in range(2 * MOST_DESCRIPTORS))
        return nn.ModuleList(layers)

    cuda, before = HostCuda(), descriptors()
    assert shared(store, many(), cuda, chunk_bytes=1) == 2 * MOST_DESCRIPTORS * LEAST_BYTES
    assert MOST_DESCRIPTORS // 2 < cuda.made <= MOST_DESCRIPTORS
    assert shared(store, many(), HostCuda(room=0)) == 2 * MOST_DESCRIPTORS * LEAST_BYTES
    assert descriptors() == before


def test_the_weights_that_memory_is_there_for_are_shared(store: WeightsStore, caplog: pytest.LogCaptureFixture) -> None:
    one, other, before = net(), net(), descriptors()
    wanted = one(IDS)
    found = shared(store, one, HostCuda(room=WEIGHTS // 2))
    assert 0 < found <= WEIGHTS // 2
    assert f"only {found} bytes of weights are shared" in caplog.text
    assert "out of memory (cuMemCreate returned 2)" in caplog.text
    assert shared(store, other, HostCuda()) == found
    assert descriptors() == before
    for network in (one, other):
        assert torch.equal(network(IDS), wanted)


def test_without_memory_nothing_is_shared_and_the_next_worker_tries(
    store: WeightsStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, third = net(), net(), net()
    wanted = one(IDS)
    assert shared(store, one, HostCuda(room=0)) == 0
    assert "not shared between the workers of the stage: CUDA error: out of memory" in caplog.text
    assert "memfd" not in "".join(places(one).values())
    assert torch.equal(one(IDS), wanted)
    assert shared(store, other, HostCuda()) == shared(store, third, HostCuda(room=0)) >= WEIGHTS


@pytest.mark.parametrize(
    ("fills", "call"),
    [
        (True, "cuMemGetAllocationGranularity"),
        (True, "cuMemAddressReserve"),
        (True, "cuMemExportToShareableHandle"),
        (True, "cuMemMap"),
        (True, "cuMemSetAccess"),
        (False, "cuMemAddressReserve"),
        (False, "cuMemImportFromShareableHandle"),
        (False, "cuMemMap"),
        (False, "cuMemSetAccess"),
    ],
)
def test_what_the_driver_refuses_changes_nothing(
    store: WeightsStore, caplog: pytest.LogCaptureFixture, fills: bool, call: str
) -> None:
    one, cuda = net(), HostCuda()
    wanted = one(IDS)
    if not fills:
        assert shared(store, net(), HostCuda())
    before = descriptors()
    cuda.failing = {call: NOT_SUPPORTED}
    assert shared(store, one, cuda) == 0
    assert f"operation not supported ({call} returned 801)" in caplog.text
    assert descriptors() == before
    assert store.sealed != fills
    assert torch.equal(one(IDS), wanted)


def test_only_a_driver_that_exports_memory_is_supported() -> None:
    def chunks(cuda: HostCuda) -> CudaChunks:
        return CudaChunks(Driver(cuda, torch.device("cuda:0")))  # type: ignore[arg-type]

    assert chunks(HostCuda()).supported()
    assert not chunks(HostCuda(exports=False)).supported()
    refusing = HostCuda()
    refusing.failing = {"cuDeviceGetAttribute": OUT_OF_MEMORY}
    assert not chunks(refusing).supported()
