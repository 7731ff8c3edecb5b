"""Both Mooncake connectors: the contract that every connector passes, against a real master; what Mooncake does of its
own: a master that dies and forgets, memory that is short, a producer or receiver that is dead."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_connector_contract as contract
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from taking import KEY, until
from test_connector_contract import MakePair, Pair, filled
from test_connector_stateful import Against

from mooncake_master import Master, need_mooncake, running_master
from namespaces import cut, hosts, mend
from segue.bench.harness.namespaces import inside
from segue.connectors.base import Arrived, Coming, Connector, Gone
from segue.connectors.create import Network, create
from segue.messages.errors import ConfigError

pytestmark = pytest.mark.needs("mooncake")
MIB = 1 << 20
KINDS = ("mooncake_engine", "mooncake_store")

globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def ground() -> Iterator[Master]:
    need_mooncake()
    with hosts(2) as made, running_master(made) as running:
        yield running


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, ground: Master) -> Iterator[MakePair]:
    made: list[Connector] = []

    def make(max_bytes: int = 64 * MIB, pool_bytes: int = MIB, threshold: int = 1024) -> Pair:
        made.extend(connect(ground, request.param, max_bytes=max_bytes, threshold=threshold) for _ in range(2))
        return Pair(made[-2], made[-1], lends=False)

    with inside(ground.host):
        yield make
        for connector in made:
            connector.close()


def connect(ground: Master, kind: str, *, max_bytes: int = 64 * MIB, threshold: int = 0, **extra: Any) -> Connector:
    extra |= {"max_bytes": max_bytes, "inline_threshold_bytes": threshold}
    if kind == "mooncake_store":
        extra = {"master": ground.address, "segment": 512 * MIB, **extra}
    return create(kind, "", extra, network=Network(ground.host.address, KEY))


@pytest.mark.parametrize("kind", KINDS)
def test_many_interleaved_requests(ground: Master, kind: str) -> None:
    class OverMooncake(Against):
        inline_below = 2000
        host = ground.host.address
        extra = {"master": ground.address, "segment": 64 * MIB} if kind == "mooncake_store" else {}

    OverMooncake.kind = kind
    with inside(ground.host):
        run_state_machine_as_test(
            OverMooncake, settings=settings(max_examples=8, stateful_step_count=30, deadline=None)
        )


@contextmanager
def connected(ground: Master, kind: str, count: int = 1, **extra: Any) -> Iterator[list[Any]]:
    """So many connectors on the first host, with the network of this thread there."""
    made: list[Any] = []
    with inside(ground.host):
        try:
            made.extend(connect(ground, kind, **extra) for _ in range(count))
            yield made
        finally:
            for connector in made:
                connector.close()


def fate(connector: Connector, metadata: dict[str, Any], request: str = "r") -> Arrived | Gone:
    woken = threading.Event()
    while isinstance(found := connector.fetch("a", "b", request, metadata, woken.set), Coming):
        assert woken.wait(90)
        woken.clear()
    return found


@contextmanager
def peer(ground: Master, kind: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A producer on the second host, and what it has put."""
    host = ground.others[0]
    process = host.start(str(Path(__file__).with_name("mooncake_peer.py")), kind, host.address, ground.address)
    assert process.stdout is not None
    try:
        yield process, msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_crosses_hosts_and_one_of_a_dead_producer_is_gone(ground: Master, kind: str) -> None:
    """The store has it in the memory of a receiver; here of the producer, the only one yet."""
    with peer(ground, kind) as (process, metadata), connected(ground, kind) as [consumer]:
        found = fate(consumer, metadata)
        assert isinstance(found, Arrived)
        assert torch.equal(found.payload["x"], torch.arange(1 << 17))
        assert isinstance(fate(consumer, metadata, "again"), Gone)
    with peer(ground, kind) as (process, metadata):
        process.kill()
        process.wait()
        with connected(ground, kind) as [consumer]:
            began = time.monotonic()
            found = fate(consumer, metadata)
            assert isinstance(found, Gone)
            assert "the fetch from" in found.reason
            assert time.monotonic() - began < 10


def test_nothing_unread_is_lost_when_the_store_is_full(ground: Master) -> None:
    with connected(ground, "mooncake_store", segment=16 * MIB) as [both]:
        sent = {}
        for n in range(20):
            ok, size, metadata = both.put("a", "b", f"r{n}", filled(MIB, n))
            assert size > MIB
            if not ok:
                assert metadata is None
                break
            sent[f"r{n}"] = metadata
        assert 8 <= len(sent) < 20
        both.release("r0")
        until(lambda: both.put("a", "b", "more", filled(MIB))[0])
        for n in range(1, len(sent)):
            found = fate(both, sent[f"r{n}"], f"r{n}")
            assert isinstance(found, Arrived)
            assert torch.equal(found.payload["x"], filled(MIB, n)["x"])


def test_a_store_to_which_nobody_lends_memory_has_no_space(ground: Master) -> None:
    network = Network(ground.host.address, KEY)
    extra = {"master": ground.address, "inline_threshold_bytes": 0}
    with inside(ground.host):
        alone = create("mooncake_store", "", extra, network=network, receives=False)
        try:
            # the master may not have forgotten yet who lent before
            until(lambda: alone.put("a", "b", "r", filled(5000))[0] is False)
        finally:
            alone.close()


def test_a_metadata_server_as_in_the_documentation_of_vllm_omni(ground: Master) -> None:
    extra = {"metadata_server": ground.metadata_server, "segment": 512_000_000, "localbuf": 64_000_000, "proto": "tcp"}
    with connected(ground, "mooncake_store", 2, **extra) as [producer, consumer]:
        _, _, metadata = producer.put("a", "b", "r", filled(5000, 3))
        found = fate(consumer, metadata)
        assert isinstance(found, Arrived)
        assert torch.equal(found.payload["x"], filled(5000, 3)["x"])


def test_a_master_that_dies_costs_what_it_knew_and_no_time(ground: Master) -> None:
    with connected(ground, "mooncake_store", 2) as [producer, consumer]:
        _, _, kept = producer.put("a", "b", "r", filled(5000))
        ground.kill()
        try:
            for _ in range(3):
                began = time.monotonic()
                assert producer.put("a", "b", "r", filled(5000))[0] is False
                producer.release("another")
                assert producer.bytes_in_use > 0
                assert time.monotonic() - began < 5
            assert isinstance(fate(consumer, kept), Gone)
        finally:
            ground.start()
        until(lambda: arrives(producer, consumer))
        producer.release("r")
        until(lambda: producer.bytes_in_use == 0)


def arrives(producer: Connector, consumer: Connector) -> bool:
    ok, _, metadata = producer.put("a", "b", "later", filled(5000, 9))
    return ok and metadata is not None and isinstance(fate(consumer, metadata, "later"), Arrived)


def test_a_receiver_that_is_cut_off_holds_its_producer_up_for_seconds(ground: Master) -> None:
    """Mooncake waits for half a minute; the worker must not, for it serves others."""
    with peer(ground, "mooncake_store"), connected(ground, "mooncake_store") as [producer]:
        cut(ground.others[0])
        try:
            took = []
            for n in range(12):  # some of them go to the memory of the first host
                began = time.monotonic()
                producer.put("a", "b", f"r{n}", filled(MIB))
                took.append(time.monotonic() - began)
            assert sum(took) < 10
        finally:
            mend(ground.others[0])


def test_rdma_without_a_device_is_refused(ground: Master) -> None:
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine has RDMA devices")
    for kind, key in (("mooncake_engine", "protocol"), ("mooncake_store", "proto")):
        with pytest.raises(ConfigError, match=f"{key} is 'rdma', but this machine has no RDMA device"):
            connect(ground, kind, **{key: "rdma"})
