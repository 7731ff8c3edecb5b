"""The NIXL connector, where NIXL is installed: the contract of all connectors, and a producer that is dead."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_connector_contract as contract
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from test_connector_contract import MakePair, Pair
from test_connector_stateful import Against

from segue.connectors.base import Coming, Connector, Gone
from segue.connectors.create import create
from segue.graph.deployment.deployment import REACH
from segue.messages.errors import ConfigError

MIB = 1 << 20
PEER = Path(__file__).with_name("nixl_peer.py")

globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    pytest.importorskip("nixl._api", reason="pip install nixl")


@pytest.fixture
def pair() -> Iterator[MakePair]:
    made: list[Connector] = []

    def make(max_bytes: int = 64 * MIB, pool_bytes: int = MIB, threshold: int = 1024) -> Pair:
        extra: dict[str, Any] = {"max_bytes": max_bytes, "inline_threshold_bytes": threshold}
        made.extend(create("nixl", "", extra) for _ in range(2))
        return Pair(made[-2], made[-1], lends=False)

    yield make
    for connector in made:
        connector.close()


def test_many_interleaved_requests() -> None:
    class OverNixl(Against):
        kind = "nixl"
        inline_below = 2000

    run_state_machine_as_test(OverNixl, settings=settings(max_examples=8, stateful_step_count=30, deadline=None))


@pytest.mark.parametrize("read_before", [False, True])
def test_a_payload_of_a_killed_producer_is_gone(read_before: bool) -> None:
    """Whether its consumer knew it or not; another producer's payloads still come."""
    consumer, other = (create("nixl", "", {"max_bytes": MIB, "inline_threshold_bytes": 0}) for _ in range(2))
    with subprocess.Popen([sys.executable, PEER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = (msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline())) for _ in range(2))
        if read_before:
            assert not isinstance(fate(consumer, first), Gone)
        process.kill()
    assert isinstance(fate(consumer, second), Gone)
    _, _, metadata = other.put("a", "b", "r", {"x": bytes(1000)})
    assert metadata is not None
    assert not isinstance(fate(consumer, metadata), Gone)
    for connector in (consumer, other):
        connector.close()


def fate(connector: Connector, metadata: dict[str, Any]) -> Any:
    woken = threading.Event()
    while isinstance(found := connector.fetch("a", "b", "r", metadata, woken.set), Coming):
        assert woken.wait(90)
        woken.clear()
    return found


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"device_name has 'nowhere0', but this machine's network devices are .*lo"):
        create("nixl", "", {"device_name": "nowhere0"})


def test_it_reaches_what_plans_expect() -> None:
    connector = create("nixl", "", {"max_bytes": MIB})
    assert connector.reach == REACH["nixl"]
    connector.close()
