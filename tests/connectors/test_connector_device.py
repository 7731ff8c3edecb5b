"""Tensors on a device between processes: by memory that both can open, else through the host. On a machine without a
GPU the device is a memfd; the same tests run on CUDA where there is one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from connector_peer import device_of, numbers, right
from payload_values import DTYPES, raw_tensor, same
from peer_process import MIB, names_left, peers, wait_for_hang_ups
from taking import take

from segue.connectors.device.memfd import MemfdMemory
from segue.connectors.device.memory import DevicePool
from segue.connectors.shm.connector import SharedMemoryConnector
from segue.connectors.shm.handover import Line
from segue.connectors.shm.segment import PAGE, put_word
from segue.messages.errors import ConfigError, StageFailed

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

cuda = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
kinds = pytest.mark.parametrize("kind", ["memfd", cuda])


@contextmanager
def connector(kind: str, name: str = "producer", **settings: Any) -> Iterator[SharedMemoryConnector]:
    sizes = {"pool_bytes": MIB, "max_bytes": 4 * MIB, "cuda_pool_bytes": 2 * MIB, "shm_threshold_bytes": 0}
    made = SharedMemoryConnector(f"{name}-{os.getpid()}", device=device_of(kind), **{**sizes, **settings})
    try:
        yield made
    finally:
        made.close()


def place(kind: str) -> str:
    return "cuda" if kind == "cuda" else "cpu"


def put(producer: SharedMemoryConnector, payload: dict[str, Any], request: str = "r", to: str = "b") -> dict[str, Any]:
    ok, _, metadata = producer.put("a", to, request, payload)
    assert ok
    assert metadata is not None
    return metadata


@kinds
def test_tensors_stay_on_the_device_and_their_slot_is_free_once_they_are_out(kind: str) -> None:
    with connector(kind) as producer, peers(f"consumer-{os.getpid()}", device=kind) as (consumer,):
        for n in range(5):
            metadata = put(producer, numbers(800_000, n, place(kind)))
            assert metadata["region"]["size"] == 800_000
            assert metadata["size"] < 1000, "the slot holds no tensor"
            assert producer.device_bytes_in_use >= 800_000
            assert consumer("get", "r", metadata, n) is True
            assert producer.bytes_in_use == 0, "nothing stays lent"
            assert consumer("get", "r", metadata, n) is None, "taken once"
        assert consumer("where", "r") == [place(kind)] * 5
        assert consumer("check", "r") is True
        producer.audit()


@kinds
def test_what_else_is_in_the_payload_comes_along(kind: str) -> None:
    with (
        connector(kind) as producer,
        peers(f"other-{os.getpid()}", device=kind) as (other,),
    ):
        on = place(kind)
        payload = {
            "rows": torch.arange(3000.0, device=on).view(50, 60).t(),
            "none": torch.empty(0, 4, device=on),
            "nested": [{"half": torch.ones(7, dtype=torch.bfloat16, device=on), "text": "é"}, (b"bytes", 1, None)],
        }
        metadata = put(producer, payload)
        ok, size, back = other("echo", metadata)
        assert ok
        assert size > 12_000
        with connector(kind, "consumer") as consumer:
            found = take(consumer, "b", "a", "r", back)
            assert found is not None
            assert same(moved(found[0], "cpu"), moved(payload, "cpu"))


def moved(value: Any, device: str) -> Any:
    """The value with its tensors on `device`."""
    match value:
        case torch.Tensor():
            return value.to(device)
        case dict():
            return {key: moved(item, device) for key, item in value.items()}
        case list() | tuple():
            return type(value)(moved(item, device) for item in value)
    return value


def test_every_dtype() -> None:
    with connector("memfd") as producer, connector("memfd", "consumer") as consumer:
        payload = {name: [raw_tensor(name, (2, 3)), raw_tensor(name, ())] for name in DTYPES}
        metadata = put(producer, payload)
        found = take(consumer, "a", "b", "r", metadata)
        assert metadata["region"]["size"] > 0
        assert found is not None
        assert same(found[0], payload)


@kinds
def test_small_payloads_ride_in_the_metadata(kind: str) -> None:
    with connector(kind, shm_threshold_bytes=65536) as producer:
        assert put(producer, numbers(8000, 0, place(kind)))["kind"] == "inline"
        assert put(producer, numbers(80_000, 0, place(kind)))["region"] is not None


@pytest.mark.parametrize("consumer_kind", ["none", "unreachable"])
def test_who_cannot_open_the_memory_gets_it_through_the_host(consumer_kind: str) -> None:
    with connector("memfd") as producer, peers(f"blind-{os.getpid()}", device=consumer_kind) as (consumer,):
        waiting = [put(producer, numbers(300_000, n)) for n in range(3)]
        assert [metadata["region"] is not None for metadata in waiting] == [True] * 3
        for n, metadata in enumerate(waiting):
            assert consumer("get", "r", metadata, n) is True
        assert producer.bytes_in_use == 0
        later = put(producer, numbers(300_000, 3))
        assert later["region"] is None, "the edge is known by now"
        assert consumer("get", "r", later, 3) is True
        assert consumer("check", "r") is True
        assert put(producer, numbers(300_000, 3), to="c")["region"] is not None, "other edges are not concerned"
        producer.audit()


def test_a_consumer_whose_device_is_full_gets_host_tensors() -> None:
    class Full:
        handle = b""

        def read(self, offset: int, size: int) -> None:
            return None

        def close(self) -> None:
            pass

    class Opens(MemfdMemory):
        def open(self, handle: bytes) -> Any:
            return Full()

    with connector("memfd") as producer:
        consumer = SharedMemoryConnector(f"full-{os.getpid()}", pool_bytes=MIB, max_bytes=MIB, device=Opens())
        found = take(consumer, "a", "b", "r", put(producer, numbers(300_000, 3)))
        consumer.close()
        assert found is not None
        assert right(found[0], 3)
        assert producer.bytes_in_use == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_consumer_without_a_gpu_gets_host_tensors() -> None:
    with connector("cuda") as producer, peers(f"host-{os.getpid()}") as (consumer,):
        assert consumer("get", "r", put(producer, numbers(300_000, 1, "cuda")), 1) is True
        assert consumer("where", "r") == ["cpu"]


def test_a_full_device_pool_sends_the_rest_through_the_host() -> None:
    with connector("memfd") as producer, connector("memfd", "consumer") as consumer:
        sent = [put(producer, numbers(900_000, n)) for n in range(4)]
        assert [metadata["region"] is not None for metadata in sent] == [True, True, False, False]
        for n in (2, 0, 3, 1):
            found = take(consumer, "a", "b", "r", sent[n])
            assert found is not None
            assert right(found[0], n)
        consumer.release("r")
        assert put(producer, numbers(900_000, 5))["region"] is not None
        assert put(producer, numbers(5 * MIB // 2, 5), "big")["region"] is None, "it would never fit"


def test_a_full_host_pool_takes_no_device_memory() -> None:
    with connector("memfd", pool_bytes=PAGE, max_bytes=PAGE, cuda_pool_bytes=MIB) as producer:
        assert producer.put("a", "b", "r", numbers(2048, 0))[0]
        ok, size, metadata = producer.put("a", "b", "r", numbers(2048, 0))
        assert (ok, metadata) == (False, None)
        assert size > 2048
        assert producer.device_bytes_in_use == 2048
        with pytest.raises(StageFailed, match="max_bytes"):
            producer.put("a", "b", "r", numbers(8000, 0))
        assert producer.device_bytes_in_use == 2048
        producer.release("r")
        assert producer.device_bytes_in_use == 0


@kinds
def test_cancelled_before_it_was_taken(kind: str) -> None:
    with connector(kind) as producer, peers(f"late-{os.getpid()}", device=kind) as (consumer,):
        first, second = (put(producer, numbers(300_000, n, place(kind))) for n in range(2))
        other = put(producer, numbers(300_000, 2, place(kind)), "other")
        producer.release("r")
        assert consumer("get", "r", first, 0) is None
        assert consumer("get", "r", second, 1) is None
        assert consumer("get", "other", other, 2) is True
        assert producer.bytes_in_use == 0


def test_a_receiver_that_dies_between_taking_and_giving_back() -> None:
    with connector("memfd") as producer:
        metadata = put(producer, numbers(300_000, 0))
        line = Line.open(metadata["address"])
        assert line is not None
        segment = line.segment(metadata["segment"])
        assert segment is not None
        waiting = put_word(metadata["generation"])
        assert line.host_copy(metadata["generation"]) is None, "it has not been taken"
        assert segment.swap(metadata["page"], waiting, waiting + line.receiver)
        producer.release("r")
        assert producer.device_bytes_in_use > 0, "somebody reads it"
        line.close()
        wait_for_hang_ups(producer)
        assert producer.bytes_in_use == 0
        producer.audit()


@kinds
def test_a_killed_producer_takes_nothing_along_that_was_taken(kind: str) -> None:
    before = names_left()
    with connector(kind, "consumer") as consumer:
        with peers(f"dies-{os.getpid()}", device=kind) as (producer,):
            _, _, taken = producer("put", "r", 300_000, 5)
            _, _, late = producer("put", "r", 300_000, 6)
            assert taken["region"] is not None
            found = take(consumer, "a", "b", "r", taken)
            producer.kill()
            assert take(consumer, "a", "b", "r", late) is None
        assert found is not None
        assert right(found[0], 5)
        consumer.release("r")
        assert found[0]["x"].device.type == place(kind)
    assert names_left() == before


def test_a_write_that_fails_frees_slot_and_region() -> None:
    class Broken(MemfdMemory):
        def settle(self) -> None:
            raise StageFailed("the device is gone")

    producer = SharedMemoryConnector(f"broken-{os.getpid()}", pool_bytes=MIB, max_bytes=MIB, device=Broken())
    with pytest.raises(StageFailed, match="gone"):
        producer.put("a", "b", "r", numbers(300_000, 0))
    assert producer.bytes_in_use == 0
    producer.close()


def test_a_device_without_memory_to_share_is_asked_once() -> None:
    class Full(MemfdMemory):
        asked = 0

        def export(self, size: int) -> None:  # type: ignore[override]
            Full.asked += 1

    pool = DevicePool(Full(), MIB)
    assert pool.take(("a", "b"), 1000) is None
    assert pool.take(("a", "b"), 1000) is None
    assert Full.asked == 1
    pool.close()


def test_no_device_pool_when_it_has_no_bytes() -> None:
    with connector("memfd", cuda_pool_bytes=0) as producer:
        assert put(producer, numbers(300_000, 0))["region"] is None
    with pytest.raises(ConfigError, match="cuda_pool_bytes is -1") as caught, connector("memfd", cuda_pool_bytes=-1):
        pass
    assert caught.value.field == "cuda_pool_bytes"
