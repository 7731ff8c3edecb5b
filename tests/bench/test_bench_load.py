"""Clients: so many and no more, every request answered, sides in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from bench_fakes import FakeDriver, outcome, request
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.bench.harness.load import LoadDriver, arriving, closed, in_turn, turn
from segue.bench.omni.outcome import Outcome, WrongWork
from segue.bench.omni.workload import BenchRequest
from segue.messages.errors import StageFailed


@given(count=st.integers(1, 20), concurrency=st.integers(1, 9))
def test_every_request_is_answered_and_the_clients_are_never_more(count: int, concurrency: int) -> None:
    driver = FakeDriver("fake", concurrency, [])
    driver.expect(count)
    requests = [request(index) for index in range(100, 100 + count)]
    outcomes = asyncio.run(asyncio.wait_for(closed(concurrency)(driver, requests), 240))
    assert [found.index for found in outcomes] == [asked.index for asked in requests], "answers are in order"
    assert sorted(driver.seen) == [asked.index for asked in requests], "each was sent once"
    assert driver.most == min(concurrency, count), "all clients work, and no more"


def test_a_client_sends_its_next_request_only_after_its_answer() -> None:
    log: list[str] = []

    class Alone(FakeDriver):
        async def run(self, asked: BenchRequest) -> Outcome:
            log.append(f"sent {asked.index}")
            found = await super().run(asked)
            log.append(f"answered {asked.index}")
            return found

    driver = Alone("fake", 1, [])
    driver.expect(3)
    asyncio.run(closed(1)(driver, [request(index) for index in range(3)]))
    assert log == [f"{what} {index}" for index in range(3) for what in ("sent", "answered")]


def test_sides_take_turns_with_the_same_requests() -> None:
    log: list[str] = []
    told: list[str] = []
    drivers = [FakeDriver(name, 2, log) for name in ("a", "b", "c")]
    rounds = [[request(index) for index in range(4)], [request(index) for index in range(4, 8)]]

    @asynccontextmanager
    async def noted(driver: LoadDriver[Any, Any], together: int) -> AsyncIterator[None]:
        async with turn(driver, together):
            log.append(f"{driver.name} begins")
            yield
            log.append(f"{driver.name} ends")

    slices = asyncio.run(in_turn(drivers, rounds, closed(2), 2, told.append, lambda taken: taken.side.upper(), noted))
    assert [(taken.side, [one.index for one in taken.outcomes]) for taken in slices] == [
        (name, [one.index for one in asked]) for asked in rounds for name in "abc"
    ]
    said = ("takes over from 2", "begins", "ends", "hands over")
    assert log == [f"{name} {what}" for _ in rounds for name in "abc" for what in said]
    assert told == [f"  round {number}/2, {name}: {name.upper()}" for number in (1, 2) for name in "abc"]
    assert all(taken.wall > 0 for taken in slices)


def test_arrivals_do_not_wait_for_answers() -> None:
    driver = FakeDriver("fake", 5, [])
    driver.expect(5)
    found = asyncio.run(asyncio.wait_for(arriving([0.0] * 5)(driver, [request(index) for index in range(5)]), 240))
    assert [one.index for one in found] == list(range(5))
    assert driver.most == 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda found: replace(found, text_ids=[1]), "1 reply tokens; the table says 2"),
        (lambda found: replace(found, codes=9), "9 codes; the table says 8"),
        (lambda found: replace(found, ttfa=float("inf")), "silence"),
        (lambda found: replace(found, audio_seconds=0.0), "no audio"),
    ],
)
def test_an_answer_of_another_length_or_without_audio_ends_the_run(change, match: str) -> None:
    driver = FakeDriver("fake", 1, [], lambda asked: change(outcome(asked)))
    driver.expect(1)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(closed(1)(driver, [request(7)]))
    assert caught.group_contains(WrongWork, match=f"request 7.*{match}")


def test_an_error_of_one_request_ends_the_run() -> None:
    def fail(asked: BenchRequest) -> Outcome:
        raise StageFailed(f"no {asked.index}")

    driver = FakeDriver("fake", 2, [], fail)
    driver.expect(4)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(closed(2)(driver, [request(index) for index in range(4)]))
    assert caught.group_contains(StageFailed, match="no 1")
