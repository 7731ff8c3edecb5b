"""The parts of the Mooncake connectors that must be right whatever Mooncake does, against fakes of its clients: slots
that a consumer reads behind the producer's back, and a store that does not answer."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from taking import until

from segue.connectors.base import Gone
from segue.connectors.fetching import Buffers, SourceLost, Taken
from segue.connectors.mooncake.client import NO_SPACE, NOT_FOUND, Client
from segue.connectors.mooncake.engine import InMemory, Peer
from segue.connectors.mooncake.library import Memory
from segue.connectors.mooncake.store import Keys, Stored, StoreSource
from segue.connectors.payload import measure
from segue.connectors.slots import Slots, SlotSource

KIB = 1024


class Engine:
    """Reads and writes memory of this process; `before_read` is called before each reading, with its number."""

    def __init__(self) -> None:
        self.before_read: Callable[[int], None] = lambda number: None
        self.reads = 0
        self.code = 0

    def register_memory(self, address: int, size: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def transfer_sync_read(self, session: str, to: int, at: int, size: int) -> int:
        self.reads += 1
        self.before_read(self.reads)
        ctypes.memmove(to, at, size)
        return self.code

    def transfer_sync_write(self, session: str, at: int, to: int, size: int) -> int:
        ctypes.memmove(to, at, size)
        return self.code


def payload(first: int, size: int = 4 * KIB) -> dict[str, Any]:
    return {"x": torch.arange(first, first + size // 8)}


class Edge:
    def __init__(self, max_bytes: int = 64 * KIB) -> None:
        self.engine = Engine()
        memory = Memory(self.engine, "register_memory", "unregister_memory")
        self.slots = Slots(memory, partial(InMemory, session="here:1"), max_bytes)
        self._memory = memory
        self.buffers = Buffers(memory.add, memory.drop)

    def put(self, first: int, request: str = "r") -> InMemory:
        place = self.slots.offer(request, measure(payload(first)))
        assert place is not None
        return place

    def fetch(self, place: InMemory) -> Taken | Gone:
        return SlotSource(Peer(place.session, self._memory)).fetch(place, self.buffers)


def is_payload(found: Taken | Gone, first: int) -> bool:
    return isinstance(found, Taken) and torch.equal(found.payload["x"], payload(first)["x"])


def test_a_payload_is_taken_once_and_its_slot_is_free() -> None:
    edge = Edge()
    place = edge.put(1)
    assert is_payload(edge.fetch(place), 1)
    assert isinstance(edge.fetch(place), Gone)
    assert edge.slots.bytes_in_use == 0


@pytest.mark.parametrize("when", [1, 2])
def test_a_slot_that_gets_another_payload_meanwhile_gives_neither(when: int) -> None:
    """Before or after the bytes are read, the producer drops the request and uses the slot again."""
    edge = Edge()
    place = edge.put(1)
    others: list[InMemory] = []

    def use_again(number: int) -> None:
        if number == when:
            edge.slots.release("r")
            others.append(edge.put(1000, "other"))

    edge.engine.before_read = use_again
    assert isinstance(edge.fetch(place), Gone)
    assert others[0].address == place.address
    assert is_payload(edge.fetch(others[0]), 1000)


def test_a_late_mark_frees_no_other_payload() -> None:
    """The slot is used again after the last look at it, before the consumer marks it."""
    edge = Edge()
    place = edge.put(1)
    write = edge.engine.transfer_sync_write
    others: list[InMemory] = []

    def late(session: str, at: int, to: int, size: int) -> int:
        edge.slots.release("r")
        others.append(edge.put(1000, "other"))
        return write(session, at, to, size)

    edge.engine.transfer_sync_write = late  # type: ignore[method-assign]
    assert is_payload(edge.fetch(place), 1)
    edge.engine.transfer_sync_write = write  # type: ignore[method-assign]
    assert edge.slots.bytes_in_use > 0
    assert is_payload(edge.fetch(others[0]), 1000)


def test_a_full_pool_takes_again_what_is_taken_or_withdrawn() -> None:
    edge = Edge(max_bytes=18 * KIB)
    places = []
    while (place := edge.slots.offer("r", measure(payload(1)))) is not None:
        places.append(place)
    assert len(places) == 4
    edge.fetch(places[1])
    edge.put(2)
    edge.slots.withdraw(places[2].number)
    edge.slots.withdraw(places[2].number)
    edge.put(3)
    assert edge.slots.offer("r", measure(payload(1))) is None
    edge.slots.release("r")
    assert edge.slots.bytes_in_use == 0


def test_a_buffer_of_a_failed_transfer_is_not_used_at_once() -> None:
    edge = Edge()
    place = edge.put(1)
    edge.engine.code = -1
    with pytest.raises(SourceLost, match="it returned -1"):
        edge.fetch(place)
    edge.engine.code = 0
    found = edge.fetch(place)
    assert is_payload(found, 1)


class Store:
    """A store in a dict; `answers` may be cleared to make it hang, `code` makes it fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.answers = threading.Event()
        self.answers.set()
        self.code = 0

    def _answer(self) -> int:
        assert self.answers.wait(60)
        return self.code

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    unregister_buffer = register_buffer

    def put_from(self, key: str, address: int, size: int, config: Any) -> int:
        if (code := self._answer()) == 0:
            self.values[key] = ctypes.string_at(address, size)
        return code

    def get_into(self, key: str, address: int, size: int) -> int:
        if (code := self._answer()) != 0:
            return code
        if key not in self.values:
            return NOT_FOUND
        ctypes.memmove(address, self.values[key], len(self.values[key]))
        return len(self.values[key])

    def remove(self, key: str, force: bool) -> int:
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        code = self._answer()
        return [code or (0 if self.values.pop(key, None) is not None else NOT_FOUND) for key in keys]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        code = self._answer()
        return [code or int(key in self.values) for key in keys]

    def close(self) -> int:
        return 0


@pytest.fixture
def store():
    made = Store()
    client = Client(made, None)
    yield made, client
    made.code = 0
    made.answers.set()
    client.close(True)


def test_the_producer_learns_what_was_taken(store: tuple[Store, Client]) -> None:
    _, client = store
    keys = Keys(client, 64 * KIB)
    place = keys.offer("r", measure(payload(1)))
    assert place is not None
    assert keys.bytes_in_use == place.size
    assert is_payload(StoreSource(client, "m").fetch(place, client.buffers), 1)
    assert keys.bytes_in_use == 0
    assert isinstance(StoreSource(client, "m").fetch(place, client.buffers), Gone)


def test_max_bytes_bounds_what_nobody_has_taken(store: tuple[Store, Client]) -> None:
    _, client = store
    keys = Keys(client, 10 * KIB)
    first = keys.offer("r", measure(payload(1)))
    assert first is not None
    assert keys.offer("r", measure(payload(2))) is not None
    assert keys.offer("r", measure(payload(3))) is None
    StoreSource(client, "m").fetch(first, client.buffers)
    assert keys.offer("r", measure(payload(3))) is not None


def test_a_store_without_space_has_not_failed(store: tuple[Store, Client]) -> None:
    made, client = store
    made.code = NO_SPACE
    assert not client.put("key", measure(payload(1)))
    made.code = 0
    assert client.put("key", measure(payload(1)))


@pytest.mark.slow
def test_a_store_that_hangs_holds_nobody_up_and_keeps_nothing(store: tuple[Store, Client]) -> None:
    """What arrives after its producer has given it up is removed, and so is what was to be removed meanwhile."""
    made, client = store
    keys = Keys(client, 64 * KIB)
    kept = keys.offer("r", measure(payload(1)))
    assert kept is not None
    made.answers.clear()
    assert keys.offer("r", measure(payload(2))) is None, "after 2 s"
    assert keys.offer("r", measure(payload(3))) is None, "at once"
    keys.release("r")
    assert list(made.values) == [kept.key]
    made.answers.set()
    until(lambda: keys.offer("later", measure(payload(4))) is not None)
    until(lambda: len(made.values) == 1)


@pytest.mark.slow
def test_a_store_that_fails_is_asked_again(store: tuple[Store, Client]) -> None:
    made, client = store
    keys = Keys(client, 64 * KIB)
    made.code = -900
    assert keys.offer("r", measure(payload(1))) is None
    with pytest.raises(SourceLost, match="it returned -900"):
        StoreSource(client, "m").fetch(Stored(bytes(8), 1, 4), client.buffers)
    made.code = 0
    until(lambda: keys.offer("r", measure(payload(2))) is not None)
