"""Both Mooncake connectors: the contract that every connector passes, against a real master; what Mooncake does of its
own: a master that dies and forgets, memory that is short, a producer or receiver that is dead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import test_connector_contract as contract
from mooncake_master import Master, master
from taking import KEY
from test_connector_contract import MakePair, Pair

from namespaces import inside
from segue.connectors.base import Connector
from segue.connectors.create import Network, create

pytestmark = pytest.mark.needs("mooncake")
MIB = 1 << 20
KINDS = ("mooncake_engine", "mooncake_store")

globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def ground() -> Iterator[Master]:
    with master() as running:
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
