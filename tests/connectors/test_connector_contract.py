"""The contract of `connectors/base.py`, for every connector: producer and consumer in one process."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from payload_values import DTYPES, raw_tensor, same
from taking import KEY, take, until

from segue.connectors.base import Connector
from segue.connectors.create import Network, create
from segue.connectors.device.cuda import cuda_memory
from segue.connectors.device.memfd import MemfdMemory
from segue.connectors.device.memory import DeviceMemory
from segue.messages.errors import StageFailed

MIB = 1 << 20
_names = (f"contract-{os.getpid()}-{number}" for number in count())


@dataclass
class Pair:
    """The two sides of one edge; the in-process connector is both."""

    producer: Any
    consumer: Any
    lends: bool = True
    """What is taken is the producer's memory until it is released; not where it comes from a device or a network."""

    def settle(self) -> None:
        """Return when the producer knows what was fetched: over a network it is told so a moment later."""
        if self.producer.reach == "network":
            until(lambda: not self.producer.bytes_in_use)

    def put(self, request: str, payload: dict[str, Any]) -> dict[str, Any]:
        ok, size, metadata = self.producer.put("a", "b", request, payload)
        assert ok
        assert size > 0
        assert metadata is not None
        return metadata

    def get(self, request: str, metadata: dict[str, Any] | None) -> tuple[dict[str, Any], int] | None:
        return take(self.consumer, "a", "b", request, metadata)


MakePair = Callable[..., Pair]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    params=[
        "inproc",
        "shm",
        "shm to itself",
        "device",
        "unreachable device",
        "tcp",
        "tcp to itself",
        pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda]),
    ]
)
def pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    made: list[Connector] = []

    def make(max_bytes: int = 64 * MIB, pool_bytes: int = MIB, threshold: int = 1024) -> Pair:
        if request.param == "inproc":
            made.append(create("inproc", "", {"max_bytes": max_bytes}))
            return Pair(made[-1], made[-1])
        if request.param.startswith("tcp"):
            extra = {"max_bytes": max_bytes, "inline_threshold_bytes": threshold}
            made.append(create("tcp", "", extra, network=Network("127.0.0.1", KEY)))
            producer = made[-1]
            if request.param == "tcp":
                made.append(create("tcp", "", extra, network=Network("127.0.0.1", KEY)))
            return Pair(producer, made[-1], lends=False)
        extra = {"max_bytes": max_bytes, "pool_bytes": pool_bytes, "shm_threshold_bytes": threshold}
        if request.param.endswith("device"):
            extra["cuda_pool_bytes"] = max_bytes
        device = device_of(request.param)
        made.append(create("shm", next(_names), extra, device))
        producer = made[-1]
        if request.param != "shm to itself":
            made.append(create("shm", next(_names), extra, device))
        return Pair(producer, made[-1], lends=request.param in ("shm", "shm to itself", "cuda"))

    yield make
    for connector in made:
        connector.close()


def device_of(kind: str) -> DeviceMemory | None:
    """What the connectors of a kind have for a device."""
    match kind:
        case "device":
            return MemfdMemory()
        case "unreachable device":
            return MemfdMemory(reachable=False)
        case "cuda":
            return cuda_memory(torch.device("cuda:0"))
    return None


def filled(size: int, value: int = 7) -> dict[str, Any]:
    return {"x": torch.full((size,), value, dtype=torch.uint8)}


@pytest.mark.parametrize("size", [0, 1, 63, 1000, 1024, 4096, 65536, MIB, 10 * MIB])
def test_sizes(pair: MakePair, size: int) -> None:
    edge = pair()
    payload = {"x": torch.arange(size, dtype=torch.int64).to(torch.uint8)}
    found = edge.get("r", edge.put("r", payload))
    assert found is not None
    assert torch.equal(found[0]["x"], payload["x"])
    assert found[1] >= size


@pytest.mark.slow
def test_256_mib_several_times_in_a_pool_that_holds_one(pair: MakePair) -> None:
    edge = pair(max_bytes=257 * MIB, pool_bytes=64 * MIB)
    payload = {"x": torch.arange(32 * MIB, dtype=torch.int64)}
    for _ in range(3):
        found = edge.get("r", edge.put("r", payload))
        assert found is not None
        assert torch.equal(found[0]["x"], payload["x"])
        del found
        edge.settle()
        edge.producer.release("r")
        edge.consumer.release("r")


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("threshold", [0, 65536])
def test_all_dtypes_nested(pair: MakePair, threshold: int) -> None:
    edge = pair(threshold=threshold)
    payload = {
        "dtypes": {name: [raw_tensor(name, (2, 3)), (raw_tensor(name, ()), raw_tensor(name, (0,)))] for name in DTYPES},
        "plain": [1, -(2**63), 2**64 - 1, 0.5, float("inf"), float("nan"), True, None, "text", b"bytes", (), [], {}],
        7: {"strided": torch.arange(12).view(3, 4).t()},
    }
    found = edge.get("r", edge.put("r", payload))
    assert found is not None
    assert same(found[0], payload)


def test_an_empty_payload(pair: MakePair) -> None:
    edge = pair(threshold=0)
    found = edge.get("r", edge.put("r", {}))
    assert found is not None
    assert found[0] == {}


def test_each_metadata_brings_its_own_payload_in_any_order(pair: MakePair) -> None:
    edge = pair()
    sizes = [10, 5000, 100, 70000, 1, 2000]
    sent = [(f"r{n % 2}", edge.put(f"r{n % 2}", filled(size, n))) for n, size in enumerate(sizes)]
    for n in (3, 0, 5, 1, 4, 2):
        found = edge.get(*sent[n])
        assert found is not None
        assert same(found[0], filled(sizes[n], n))


@pytest.mark.slow
def test_a_slow_reader_keeps_what_it_holds(pair: MakePair) -> None:
    """Views stay as they are while the pool around them is filled and emptied many times."""
    edge = pair(max_bytes=4 * MIB)
    held = edge.get("slow", edge.put("slow", filled(100_000, 1)))
    waiting = edge.put("slow", filled(100_000, 2))
    for n in range(100):
        request = f"fast{n}"
        found = edge.get(request, edge.put(request, filled(300_000, n)))
        assert found is not None
        assert same(found[0], filled(300_000, n))
        edge.consumer.release(request)
    assert held is not None
    assert same(held[0], filled(100_000, 1))
    late = edge.get("slow", waiting)
    assert late is not None
    assert same(late[0], filled(100_000, 2))


def test_a_full_pool_refuses_until_a_release(pair: MakePair) -> None:
    edge = pair(max_bytes=2 * MIB)
    if not edge.lends:
        pytest.skip("a full device pool is no refusal, and over a network nothing is lent")
    metadata = {}
    for n in range(100):
        ok, size, found = edge.producer.put("a", "b", f"r{n}", filled(500_000, n))
        assert size > 500_000
        assert ok == (found is not None)
        if not ok:
            break
        metadata[f"r{n}"] = found
    else:
        pytest.fail("the pool was never full")
    assert len(metadata) >= 3
    taken = edge.get("r0", metadata["r0"])
    assert taken is not None
    assert not edge.producer.put("a", "b", "more", filled(500_000))[0], "taken is not released"
    edge.consumer.release("r0")
    assert edge.producer.put("a", "b", "more", filled(500_000))[0]
    assert not edge.producer.put("a", "b", "more", filled(500_000))[0]
    edge.producer.release("r1")
    assert edge.producer.put("a", "b", "more", filled(500_000))[0]


def test_after_many_sizes_the_largest_still_fits(pair: MakePair) -> None:
    """However the pool grew: when all is released, a payload of nearly `max_bytes` goes through."""
    edge = pair(max_bytes=8 * MIB)
    for round_ in range(3):
        for n in range(8):
            edge.put(f"r{n}", filled(600_000, n))
        for n in range(8):
            edge.producer.release(f"r{n}")
        found = edge.get("big", edge.put("big", filled(8 * MIB - 4096, round_)))
        assert found is not None
        assert same(found[0]["x"][::4099].clone(), torch.full((2046,), round_, dtype=torch.uint8))
        del found
        edge.consumer.release("big")
        edge.settle()
    assert edge.producer.bytes_in_use == 0


def test_a_payload_that_can_never_fit_is_an_error(pair: MakePair) -> None:
    edge = pair(max_bytes=2 * MIB)
    with pytest.raises(StageFailed, match="max_bytes") as caught:
        edge.producer.put("a", "b", "r", filled(2 * MIB))
    assert caught.value.field == "max_bytes"
    assert edge.producer.bytes_in_use == 0


def test_cancelled_before_it_was_taken(pair: MakePair) -> None:
    edge = pair()
    first, second = edge.put("r", filled(5000)), edge.put("r", filled(6000))
    other = edge.put("other", filled(5000))
    edge.producer.release("r")
    assert edge.get("r", first) is None
    assert edge.get("r", second) is None
    assert edge.get("other", other) is not None


@pytest.mark.parametrize("size", [10, 5000])
def test_each_metadata_is_taken_once(pair: MakePair, size: int) -> None:
    edge = pair()
    metadata = edge.put("r", filled(size))
    first = edge.get("r", metadata)
    assert first is not None
    assert edge.get("r", metadata) is None
    assert same(first[0], filled(size))


def test_releasing_twice_and_the_unknown(pair: MakePair) -> None:
    edge = pair()
    metadata = edge.put("r", filled(5000))
    assert edge.get("r", metadata) is not None
    for _ in range(2):
        edge.consumer.release("r")
        edge.producer.release("r")
        edge.consumer.release("never heard of")
        edge.consumer.release("r", metadata)
        edge.producer.release("never heard of", metadata)
    assert edge.producer.bytes_in_use == 0


def test_stale_metadata_gives_none_and_nobody_elses_bytes(pair: MakePair) -> None:
    edge = pair()
    stale = edge.put("r", filled(5000, 1))
    edge.producer.release("r")
    fresh = edge.put("r", filled(5000, 2))
    assert edge.get("r", stale) is None
    found = edge.get("r", fresh)
    assert found is not None
    assert same(found[0], filled(5000, 2))


@pytest.mark.parametrize("size", [10, 5000])
def test_one_chunk_of_a_stream_is_released(pair: MakePair, size: int) -> None:
    edge = pair(threshold=100)
    first, second, third = (edge.put("r", filled(size, n)) for n in range(3))
    assert edge.get("r", first) is not None
    kept = edge.get("r", second)
    used = edge.producer.bytes_in_use
    edge.consumer.release("r", first)
    if size == 5000:
        assert edge.producer.bytes_in_use < used or not edge.lends
        edge.producer.release("r", third)
        assert edge.get("r", third) is None
    assert edge.get("r", first) is None
    assert kept is not None
    assert same(kept[0], filled(size, 1))


@pytest.mark.parametrize(
    "metadata", [None, {}, {"kind": "slot"}, {"kind": "pigeon"}, {"kind": "inline", "data": 3}, {"kind": "inproc"}]
)
def test_metadata_that_no_put_returned(pair: MakePair, metadata: dict[str, Any] | None) -> None:
    edge = pair()
    with pytest.raises(StageFailed, match="'a' to 'b' came with broken metadata"):
        edge.get("r", metadata)


def test_a_payload_that_cannot_travel_leaves_nothing_behind(pair: MakePair) -> None:
    edge = pair()
    with pytest.raises(StageFailed, match=r"payload\['x'\]"):
        edge.producer.put("a", "b", "r", {"x": object()})
    assert edge.producer.bytes_in_use == 0


def test_calls_after_close_are_errors(pair: MakePair) -> None:
    edge = pair()
    metadata = edge.put("r", filled(5000))
    for side in (edge.producer, edge.consumer):
        side.close()
        side.close()
        with pytest.raises(StageFailed, match="closed"):
            side.put("a", "b", "r", {})
        with pytest.raises(StageFailed, match="closed"):
            take(side, "a", "b", "r", metadata)
        with pytest.raises(StageFailed, match="closed"):
            side.release("r")


@pytest.mark.gpu
@needs_cuda
def test_cuda_tensors_arrive(pair: MakePair) -> None:
    edge = pair()
    sent = torch.arange(100_000, device="cuda", dtype=torch.float32)
    found = edge.get("r", edge.put("r", {"x": sent, "strided": sent.view(100, 1000).t()}))
    assert found is not None
    assert torch.equal(found[0]["x"].cpu(), sent.cpu())
    assert torch.equal(found[0]["strided"].cpu(), sent.view(100, 1000).t().cpu())
