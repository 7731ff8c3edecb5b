"""Responses are kept within bounds, and a conversation as long as one of its responses needs it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.messages.errors import InvalidRequest, NotFound, Overloaded
from segue.server.http.errors import StorageFull, Unsupported
from segue.server.openai.responses.journal import Journal
from segue.server.openai.responses.store import ResponseStore, Turn, items_so_far


def response(name: str, text: str = "x", status: str = "completed") -> dict[str, Any]:
    return {"id": name, "output": [{"said": text}], "status": status}


def asked(text: str) -> bytes:
    return msgspec.json.encode([{"asked": text}])


def test_a_conversation_outlives_its_first_responses() -> None:
    store = ResponseStore(9, 10_000)
    store.keep(response("a", "1"), asked("1"), None)
    store.keep(response("b", "2"), asked("2"), store.turn("a"))
    store.forget("a")
    assert items_so_far(store.turn("b")) == [{"asked": "1"}, {"said": "1"}, {"asked": "2"}, {"said": "2"}]
    store.forget("b")
    assert (store.size, len(store)) == (0, 0)


def test_a_turn_that_is_gone_on_from_while_it_is_given_up() -> None:
    """A request runs for long; what it goes on from may have made room by then."""
    store = ResponseStore(9, 10_000)
    store.keep(response("a"), asked("1"), None)
    before = store.turn("a")
    store.forget("a")
    store.keep(response("b"), asked("2"), before)
    assert len(items_so_far(store.turn("b"))) == 4
    store.forget("b")
    assert store.size == 0


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    store = ResponseStore(9, 100)
    store.keep(response("a", "x" * 200), asked("1"), None)
    with pytest.raises(NotFound, match="which is not stored here") as caught:
        store.turn("a")
    assert (caught.value.field, store.size) == ("previous_response_id", 0)


def test_nothing_is_gone_on_from_before_it_is_there() -> None:
    store = ResponseStore(9, 10_000)
    store.begin(response("a", status="queued"), asked("1"), None, [b"0"], 0)
    for status in ("queued", "in_progress"):
        store.add("a", [b"1"], response("a", status=status))
        with pytest.raises(InvalidRequest, match=f"whose status is {status}"):
            store.turn("a")
    store.end(response("a"), [b"2"])
    assert items_so_far(store.turn("a")) == [{"asked": "1"}, {"said": "x"}]


def test_events_are_given_up_before_their_response() -> None:
    store = ResponseStore(9, 400)
    journal = store.begin(response("a", status="queued"), asked("1"), None, [b"0"], 0)
    with pytest.raises(StorageFull, match="have grown to more than 400 bytes"):
        store.add("a", [b"x" * 400], None)
    store.end(response("a", status="failed"), [b"y"])
    assert (journal.size, journal.ended) == (402, True)
    assert b"failed" in store.response("a")
    assert store.of_background("a")
    with pytest.raises(Unsupported, match="while there is space"):
        store.journal("a")
    store.forget("a")
    assert store.size == 0


_STEPS = st.tuples(
    st.sampled_from(("keep", "keep", "begin", "add", "end", "forget")), st.integers(0, 30), st.integers(-1, 30),
    st.integers(0, 60),
)  # fmt: skip


@given(st.lists(_STEPS, max_size=60))
def test_the_books_agree(steps: list[tuple[str, int, int, int]]) -> None:
    """Whatever is kept, begun, gone on from and forgotten: the size is that of what can still be reached."""
    store = ResponseStore(5, 900)
    turns: dict[str, Turn] = {}
    begun: dict[str, tuple[Journal, int]] = {}
    """Those that are being made: their events, and what they hold besides."""
    names: list[str] = []
    for number, (step, one, previous, length) in enumerate(steps):
        name, before = f"r{number}", turns.get(f"r{previous}")
        some = sorted(begun)[one % len(begun)] if begun else ""
        if step == "keep":
            store.keep(response(name, "x" * length), asked(name), before)
            names.append(name)
        elif step == "begin":
            with suppress(Overloaded):
                journal = store.begin(response(name, "", "queued"), asked(name), before, [b"0"], length)
                begun[name] = journal, length
                names.append(name)
        elif step == "add" and some:
            with suppress(StorageFull):
                store.add(some, [b"e" * length], response(some, "", "in_progress") if length % 2 else None)
        elif step == "end" and some:
            store.end(response(some, "x" * length), [b"e"])
            del begun[some]
        elif step == "forget" and f"r{one}" in store and f"r{one}" not in begun:
            store.forget(f"r{one}")
        names = [one for one in names if one in store]
        turns |= {one: store.turn(one) for one in names if one not in begun}
        assert begun.keys() <= set(names)
        assert store.size == _reached(store, names, begun)
        assert store.size <= 900 or len(begun) == len(names)
        assert len(store) == len(names) <= 5


def _reached(store: ResponseStore, names: list[str], begun: dict[str, tuple[Journal, int]]) -> int:
    size = 0
    reached: dict[int, Turn | None] = {}
    for one in names:
        before, inputs = store.inputs(one)
        size += len(store.response(one))
        if one in begun:
            size += len(inputs) + len(b"[]") + begun[one][0].size + begun[one][1]
            turn = before
        else:
            turn = store.turn(one)
            with suppress(Unsupported):
                size += store.journal(one).size
        while turn is not None:
            reached[id(turn)] = turn
            turn = turn.before
    return size + sum(turn.size for turn in reached.values() if turn is not None)
