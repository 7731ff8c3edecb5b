"""Payloads that come over a network: fed in order, fetched side by side, freed when nobody wants them any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.connectors.base import Arrived, Coming, Fetched, Gone
from segue.connectors.payload import PayloadError
from segue.messages.wire import Chunk, Peer
from segue.worker.edges.arrivals import Arrivals

EDGE = ("a", "b")
SOURCE = Peer("a", "a.0-1", "ipc://a", 1)


class Network:
    """A connector whose payloads arrive when the test says so."""

    def __init__(self) -> None:
        self.outcome: dict[int, Arrived | Gone] = {}
        self.wakes: dict[int, Callable[[], None]] = {}
        self.released: list[int] = []

    def fetch(self, a: str, b: str, request_id: str, meta: Any, wake: Callable[[], None]) -> Fetched:
        if meta["n"] < 0:
            raise PayloadError("not a payload")
        self.wakes[meta["n"]] = wake
        return self.outcome.get(meta["n"], Coming())

    def land(self, number: int, outcome: Arrived | Gone) -> None:
        self.outcome[number] = outcome
        self.wakes[number]()

    def release(self, request_id: str, meta: Any) -> None:
        self.released.append(meta["n"])


def chunk(number: int, request: str = "r", *, meta: bool = True) -> Chunk:
    return Chunk(request, SOURCE, "b", 1, number, final=False, meta={"n": number} if meta else None, nbytes=8, sent=0.0)


@pytest.fixture
def network() -> Network:
    return Network()


@given(st.permutations(range(5)), st.data())
def test_chunks_of_a_stream_stay_in_order(order: list[int], data: st.DataObject) -> None:
    network = Network()
    wakes: list[int] = []
    arrivals = Arrivals({EDGE: network}, lambda: wakes.append(1))
    without = data.draw(st.sets(st.integers(1, 4)))
    for number in range(5):
        assert arrivals.take(chunk(number, meta=number not in without)) == Coming()
    fed: list[int] = []
    for number in [number for number in order if number not in without]:
        network.land(number, Gone("dead") if number == 3 else Arrived({"n": number}, 8))
        assert wakes, "the worker sleeps until it is woken"
        for one, found in arrivals.poll():
            assert (found is None) == (one.seq in without)
            assert isinstance(found, Gone) == (one.seq == 3 and 3 not in without)
            fed.append(one.seq)
        assert fed == list(range(len(fed)))
    assert fed == list(range(5))
    assert arrivals.count() == 0
    assert arrivals.take(chunk(0)) == Arrived({"n": 0}, 8), "nothing is before it any more"


def test_streams_do_not_wait_for_each_other(network: Network) -> None:
    arrivals = Arrivals({EDGE: network}, lambda: None)
    arrivals.take(chunk(0, "slow"))
    network.outcome[1] = Arrived({}, 8)
    assert arrivals.take(chunk(1, "fast")) == Arrived({}, 8)


def test_what_nobody_wants_is_freed(network: Network) -> None:
    arrivals = Arrivals({EDGE: network}, lambda: None)
    arrivals.take(chunk(0))
    network.outcome[1] = Arrived({}, 8)
    arrivals.take(chunk(1))
    arrivals.take(chunk(2, "other"))
    arrivals.drop("r", "b", "somebody else")
    assert network.released == []
    arrivals.drop("r", "b")
    assert network.released == [0, 1]
    network.land(0, Arrived({}, 8))
    assert arrivals.poll() == []
    assert arrivals.count() == 1


def test_broken_metadata_cost_the_payload_and_not_the_worker(network: Network) -> None:
    assert arrivals_of(network).take(chunk(-1)) == Gone("not a payload")


def arrivals_of(network: Network) -> Arrivals:
    return Arrivals({EDGE: network}, lambda: None)
