"""Streams that leave a worker: order, budgets, retention, replay; against a model, with a connector that fills up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.connectors.base import Arrived
from segue.messages.wire import Chunk, Peer
from segue.worker.edges.outbox import Channel, Outbox
from segue.worker.edges.retained import RetainedStore

SOURCE = Peer("a", "a.0-1", "ipc://a", 1)
TARGET = Peer("b", "b.0-1", "ipc://b", 1)
EDGE = ("a", "b")


class Slots:
    """A connector with room for a few payloads, all in this process."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[int, dict[str, Any]] = {}
        self.count = 0

    def put(self, a: str, b: str, request_id: str, payload: dict[str, Any]) -> tuple[bool, int, dict[str, Any] | None]:
        if len(self.held) >= self.room:
            return False, 8, None
        self.count += 1
        self.held[self.count] = payload
        return True, 8, {"slot": self.count}

    def fetch(self, a: str, b: str, request_id: str, metadata: Any, wake: Any) -> Arrived:
        return Arrived(self.held.pop(metadata["slot"]), 8)

    def release(self, request_id: str) -> None: ...

    def close(self) -> None: ...


class Wire:
    """What was sent, and the downstream that takes it."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.chunks: list[Chunk] = []

    def send(self, address: str, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def take(self) -> tuple[int, Any, bool]:
        chunk = self.chunks.pop(0)
        taken = self.slots.fetch("a", "b", chunk.request_id, chunk.meta, None) if chunk.meta else None
        return chunk.seq, taken.payload["n"] if taken else None, chunk.final


def outbox(tmp_path: Path, *, room: int = 100, budget: int = 1 << 20, keep: int = 1 << 20) -> tuple[Outbox, Wire]:
    slots = Slots(room)
    wire = Wire(slots)
    store = RetainedStore(keep, str(tmp_path))
    return Outbox({EDGE: Channel(slots, None, budget, retain=True)}, store, wire.send), wire


def test_chunks_arrive_in_order_and_the_last_is_final(tmp_path: Path) -> None:
    box, wire = outbox(tmp_path)
    box.open("r", SOURCE, TARGET)
    for number in range(3):
        box.push("r", "a", "b", {"n": number}, final=False)
    box.push("r", "a", "b", None, final=True)
    assert [wire.take() for _ in range(4)] == [(0, 0, False), (1, 1, False), (2, 2, False), (3, None, True)]


def test_over_the_budget_a_flow_waits_until_something_is_consumed(tmp_path: Path) -> None:
    box, wire = outbox(tmp_path, budget=16)
    box.open("r", SOURCE, TARGET)
    for number in range(4):
        box.push("r", "a", "b", {"n": number}, final=False)
    assert len(wire.chunks) == 2
    assert box.blocked("r", "a")
    box.consumed("r", "a", TARGET, 0, finished=False)
    box.pump()
    assert len(wire.chunks) == 3
    box.consumed("r", "a", TARGET, 2, finished=False)
    box.pump()
    assert len(wire.chunks) == 4
    assert not box.blocked("r", "a")


@pytest.mark.parametrize("final", [False, True])
def test_the_first_chunks_wait_for_each_other_or_for_the_end(tmp_path: Path, final: bool) -> None:
    slots = Slots(100)
    wire = Wire(slots)
    box = Outbox(
        {EDGE: Channel(slots, None, 1 << 20, retain=True, start=3)}, RetainedStore(1 << 20, str(tmp_path)), wire.send
    )
    box.open("r", SOURCE, TARGET)
    box.push("r", "a", "b", {"n": 0}, final=False)
    assert box.resend("r", "a", Peer("b", "b.0-2", "ipc://b2", 2))  # nothing was sent: it waits for the new one, too
    box.push("r", "a", "b", {"n": 1}, final=final)
    assert len(wire.chunks) == (2 if final else 0)
    assert not box.blocked("r", "a")  # the stage has to go on
    if not final:
        box.push("r", "a", "b", {"n": 2}, final=False)
        box.push("r", "a", "b", {"n": 3}, final=False)
        assert [wire.take()[:2] for _ in range(4)] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_one_chunk_always_goes_where_the_downstream_has_nothing(tmp_path: Path) -> None:
    box, wire = outbox(tmp_path, budget=8)
    other = Peer("b", "b.1-1", "ipc://b1", 1)
    box.open("full", SOURCE, TARGET)
    box.open("starving", SOURCE, other)
    box.push("full", "a", "b", {"n": 0}, final=False)
    box.push("starving", "a", "b", {"n": 1}, final=False)
    assert [chunk.request_id for chunk in wire.chunks] == ["full", "starving"]


def test_an_answer_from_an_attempt_that_is_over_counts_for_nothing(tmp_path: Path) -> None:
    box, wire = outbox(tmp_path, budget=8)
    box.open("r", SOURCE, TARGET)
    box.push("r", "a", "b", {"n": 0}, final=False)
    box.push("r", "a", "b", {"n": 1}, final=False)
    box.consumed("r", "a", Peer("b", "b.0-0", "ipc://old", 0), 0, finished=False)
    box.pump()
    assert len(wire.chunks) == 1


def test_resend_gives_everything_again_to_the_new_worker(tmp_path: Path) -> None:
    box, wire = outbox(tmp_path, budget=16)
    box.open("r", SOURCE, TARGET)
    for number in range(4):
        box.push("r", "a", "b", {"n": number}, final=number == 3)
    wire.chunks.clear()
    fresh = Peer("b", "b.0-2", "ipc://b2", 2)
    assert box.resend("r", "a", fresh)
    got = []
    while wire.chunks:
        got.append(wire.take())
        box.consumed("r", "a", fresh, got[-1][0], finished=False)
        box.pump()
    assert got == [(0, 0, False), (1, 1, False), (2, 2, False), (3, 3, True)]
    assert box.resend("r", "a", Peer("b", "b.0-3", "ipc://b3", 3)), "what was sent again is kept again"


def test_nothing_is_kept_once_the_downstream_has_finished(tmp_path: Path) -> None:
    box, _ = outbox(tmp_path)
    box.open("r", SOURCE, TARGET)
    box.push("r", "a", "b", {"n": 0}, final=True)
    box.consumed("r", "a", TARGET, 0, finished=True)
    assert not box.resend("r", "a", TARGET)
    assert box.edges() == {EDGE: {"in_flight_bytes": 0, "flows": 0, "pending_chunks": 0}}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pcrd"), st.integers(0, 2)), max_size=60),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([0, 24, 1 << 20]),
)
def test_any_order_of_events_keeps_each_stream_whole(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int]], room: int, budget: int, keep: int
) -> None:
    """push, consume, resend, drop in any order: every flow's stream reaches its newest target in order, from 0."""
    box, wire = outbox(tmp_path_factory.getbasetemp(), room=room, budget=budget, keep=keep)
    pushed: dict[str, int] = {}
    target: dict[str, Peer] = {}
    got: dict[str, list[int]] = {}

    def drain(*, only: int | None = None) -> None:
        count = 0
        while wire.chunks and (only is None or count < only):
            count += 1
            chunk = wire.chunks[0]
            _, value, _ = wire.take()
            name = chunk.request_id
            if name in target and chunk.seq == len(got[name]):
                got[name].append(value)
                box.consumed(name, "a", target[name], chunk.seq, finished=False)
            box.pump()

    for kind, number in events:
        name = f"r{number}"
        if kind == "p":
            if name not in target:
                target[name], got[name], pushed[name] = TARGET, [], 0
                box.open(name, SOURCE, TARGET)
            box.push(name, "a", "b", {"n": pushed[name]}, final=False)
            pushed[name] += 1
        elif kind == "c":
            drain(only=1)
        elif kind == "r" and name in target:
            drain()  # what is under way to the old target is lost with it
            attempt = target[name].attempt + 1
            target[name], got[name] = Peer("b", f"b.0-{attempt}", "ipc://b", attempt), []
            assert box.resend(name, "a", target[name])
        elif kind == "d" and name in target:
            drain()
            box.drop(name)
            del target[name], got[name], pushed[name]
    drain()
    assert got == {name: list(range(count)) for name, count in pushed.items()}
    assert not box.waiting()
    box.close()


def test_retained_payloads_survive_the_file(tmp_path: Path) -> None:
    store = RetainedStore(64, str(tmp_path))
    tensors = [torch.arange(n, dtype=torch.bfloat16) for n in (30, 40, 50)]
    for tensor in tensors:
        store.append(("r", "a", "b"), {"t": tensor}, tensor.nbytes, final=False)
    assert store.in_memory <= 64
    assert store.spilled > 0
    assert not list(tmp_path.iterdir()), "the file has no name"
    chunks = store.replay(("r", "a", "b"))
    assert chunks is not None
    for (payload, final), tensor in zip(chunks, tensors, strict=True):
        assert payload is not None
        assert torch.equal(payload["t"], tensor)
        assert not final
    store.drop_request("r")
    assert store.in_memory == store.spilled == 0


def test_without_a_place_to_write_the_request_is_no_longer_kept(tmp_path: Path) -> None:
    store = RetainedStore(8, str(tmp_path / "missing"))
    store.append(("r", "a", "b"), {"t": torch.zeros(100)}, 400, final=False)
    assert store.replay(("r", "a", "b")) is None
    assert store.in_memory == 0
    store.append(("r", "a", "b"), {"t": torch.zeros(100)}, 400, final=True)
    assert store.replay(("r", "a", "b")) is None


def test_what_an_abandoned_attempt_sent_is_freed(tmp_path: Path) -> None:
    wire = Wire(Slots(9))
    channel = Channel(wire.slots, None, budget=8, retain=True)
    outbox = Outbox({EDGE: channel}, RetainedStore(1 << 20, str(tmp_path)), wire.send)
    outbox.open("r", SOURCE, TARGET)
    for number in range(3):
        outbox.push("r", "a", "b", {"n": number}, final=False)
    assert channel.in_flight
    assert outbox.waiting()
    outbox.abandon("r", "a", SOURCE.attempt - 1)
    assert outbox.waiting()
    outbox.abandon("r", "a", SOURCE.attempt)
    assert not outbox.waiting()
    assert channel.in_flight == outbox.retained.in_memory == 0
