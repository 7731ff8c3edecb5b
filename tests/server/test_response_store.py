"""Responses are kept within bounds, and a conversation as long as one of its responses needs it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.messages.errors import NotFound
from segue.server.response_store import ResponseStore, Turn, items_so_far


def response(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "output": [{"said": text}]}


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
    with pytest.raises(NotFound, match="no such response is kept here") as caught:
        store.turn("a")
    assert (caught.value.field, store.size) == ("previous_response_id", 0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 30), st.integers(0, 60)), max_size=60))
def test_the_books_agree(steps: list[tuple[int, int, int]]) -> None:
    """Whatever is kept, gone on from and forgotten: the size is that of what can still be reached."""
    store = ResponseStore(5, 900)
    turns: dict[str, Turn] = {}
    for number, (forgotten, previous, length) in enumerate(steps):
        name = f"r{number}"
        store.keep(response(name, "x" * length), asked(name), turns.get(f"r{previous}"))
        if name in store:
            turns[name] = store.turn(name)
        if f"r{forgotten}" in store:
            store.forget(f"r{forgotten}")
        names = [one for one in turns if one in store]
        reached: dict[int, Turn] = {}
        for one in names:
            turn: Turn | None = store.turn(one)
            while turn is not None:
                reached[id(turn)] = turn
                turn = turn.before
        whole = sum(turn.size for turn in reached.values()) + sum(len(store.response(one)) for one in names)
        assert store.size == whole <= 900
        assert len(store) == len(names) <= 5
