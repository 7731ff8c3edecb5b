"""Shared memory between real processes, which are killed in the middle of things."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from connector_peer import numbers, right
from peer_process import MIB, names_left, peers, wait_for_hang_ups
from taking import take

from segue.connectors.shm.connector import SharedMemoryConnector


@pytest.fixture
def connector() -> Iterator[SharedMemoryConnector]:
    made = SharedMemoryConnector(f"here-{os.getpid()}", pool_bytes=MIB, max_bytes=2 * MIB, shm_threshold_bytes=0)
    yield made
    made.close()


def test_a_killed_receiver_gives_its_slots_back(connector: SharedMemoryConnector) -> None:
    size = 300_000
    with peers(f"dies-{os.getpid()}", f"lives-{os.getpid()}") as (dies, lives):
        put = [connector.put("a", "b", f"r{n}", numbers(size, n))[2] for n in range(4)]
        assert dies("get", "r0", put[0], 0) is True
        assert dies("get", "r1", put[1], 1) is True
        assert lives("get", "r2", put[2], 2) is True
        connector.release("r0")  # a cancelled request keeps what a live receiver looks at
        connector.release("r2")
        assert dies("check", "r0") is True
        in_use = connector.bytes_in_use
        dies.kill()
        assert lives("get", "r0", put[0], 0) is None
        connector.release("r1")
        wait_for_hang_ups(connector)
        assert connector.bytes_in_use == in_use // 2
        connector.audit()
        while (again := connector.put("a", "b", "again", numbers(size, 9)))[0]:
            assert again[2] is not None
        assert lives("check", "r2") is True
        assert lives("get", "r3", put[3], 3) is True
        lives("release", "r2")
        assert connector.put("a", "b", "again", numbers(size, 9))[0]
        connector.audit()


def test_a_killed_producer_leaves_views_and_nothing_else(connector: SharedMemoryConnector) -> None:
    before = names_left()
    address = f"producer-{os.getpid()}"
    with peers(address, f"other-{os.getpid()}") as (producer, other):
        assert len(names_left()) == len(before) + 2
        _, _, taken = producer("put", "r", 300_000, 5)
        _, _, late = producer("put", "r", 300_000, 6)
        _, _, mapped_by_nobody = producer("put", "r", 300_000, 7)
        found = take(connector, "a", "b", "r", taken)
        assert found is not None
        producer.kill()
        assert take(connector, "a", "b", "r", late) is None
        assert other("get", "r", mapped_by_nobody, 7) is None
        assert right(found[0], 5)
        other("close")
        assert names_left() == before

        with peers(address) as (restarted,):
            _, _, fresh = restarted("put", "r", 300_000, 8)
            assert take(connector, "a", "b", "r", late) is None, "metadata of the old pool is not for the new one"
            again = take(connector, "a", "b", "r", fresh)
            assert again is not None
            assert right(again[0], 8)
            assert right(found[0], 5)
            connector.release("r")
        assert names_left() == before


def test_a_producer_that_closes_is_gone_like_one_that_died(connector: SharedMemoryConnector) -> None:
    producer = SharedMemoryConnector(f"closes-{os.getpid()}", pool_bytes=MIB, max_bytes=MIB, shm_threshold_bytes=0)
    _, _, first = producer.put("a", "b", "r", numbers(8000, 1))
    _, _, second = producer.put("a", "b", "r", numbers(8000, 2))
    found = take(connector, "a", "b", "r", first)
    producer.close()
    del producer
    gc.collect()
    assert found is not None
    assert right(found[0], 1)
    assert take(connector, "a", "b", "r", second) is None
    connector.release("r")


def test_views_outlive_the_connector_that_made_them() -> None:
    with peers(f"source-{os.getpid()}") as (producer,):
        consumer = SharedMemoryConnector(f"short-{os.getpid()}", pool_bytes=4096, max_bytes=4096)
        found = take(consumer, "a", "b", "r", producer("put", "r", 300_000, 4)[2])
        consumer.close()
        del consumer
        gc.collect()
        assert found is not None
        assert right(found[0], 4)


def test_both_ways_between_two_processes(connector: SharedMemoryConnector) -> None:
    with peers(f"both-{os.getpid()}") as (peer,):
        for n in range(50):
            request = f"r{n}"
            assert peer("get", request, connector.put("a", "b", request, numbers(200_000, n))[2], n) is True
            found = take(connector, "b", "a", request, peer("put", request, 200_000, n + 1)[2])
            assert found is not None
            assert right(found[0], n + 1)
            connector.release(request)
            peer("release", request)
        assert connector.bytes_in_use == 0
        connector.audit()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_thread_or_mapping_is_left() -> None:
    def use() -> None:
        one = SharedMemoryConnector(f"one-{os.getpid()}", pool_bytes=MIB, max_bytes=8 * MIB, shm_threshold_bytes=0)
        two = SharedMemoryConnector(f"two-{os.getpid()}", pool_bytes=MIB, max_bytes=8 * MIB)
        for n in range(6):
            metadata = one.put("a", "b", f"r{n}", numbers(MIB - 4096, n))[2]
            assert take(two, "a", "b", f"r{n}", metadata) is not None
        one.close()
        two.close()

    use()
    fds, threads = descriptors(), threading.active_count()
    use()
    assert descriptors() <= fds  # of earlier tests some may just end
    assert threading.active_count() <= threads
    assert "memfd:segue-pool" not in Path("/proc/self/maps").read_text()
