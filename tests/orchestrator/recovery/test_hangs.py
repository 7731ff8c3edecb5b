"""Who is taken to hang, by a clock that the tests set."""

from __future__ import annotations

import pytest

from segue.orchestrator.workers.hangs import HangWatch
from segue.orchestrator.workers.replicas import Replica

LIMIT = 4.0


@pytest.fixture
def busy() -> Replica:
    return Replica(("tone",), 0, state="ready", pid=1, requests={"a"})


def looks(watch: HangWatch, replica: Replica, *times: float) -> list[str]:
    """What each look finds."""
    found = []
    for now in times:
        seen = watch.look([replica], now)
        found.append("asks" if seen.ask else "kills" if seen.kill else "")
    return found


def test_one_that_does_not_answer_is_killed_when_its_time_is_over(busy: Replica) -> None:
    assert looks(HangWatch(LIMIT, 0.0), busy, 0, 1, 2, 3, 4) == ["asks", "", "", "", "kills"]


def test_one_that_answers_is_asked_again(busy: Replica) -> None:
    watch = HangWatch(LIMIT, 0.0)
    assert looks(watch, busy, 0, 1, 2, 3) == ["asks", "", "", ""]
    busy.pinged = None
    assert looks(watch, busy, 4, 5, 6, 7, 8) == ["asks", "", "", "", "kills"]


def test_time_in_which_nobody_could_hear_an_answer_does_not_count(busy: Replica) -> None:
    """A caller's own code held up the event loop, or the machine slept."""
    watch = HangWatch(LIMIT, 0.0)
    assert looks(watch, busy, 0, 1, 60, 61) == ["asks", "", "", ""]
    assert looks(watch, busy, 62) == ["kills"]


def test_one_that_does_nothing_owes_nothing(busy: Replica) -> None:
    """It may be stopped for as long as it likes."""
    busy.requests.clear()
    watch = HangWatch(LIMIT, 0.0)
    assert looks(watch, busy, *range(20)) == [""] * 20
    busy.requests.add("a")
    assert looks(watch, busy, 20, 21) == ["asks", ""]


@pytest.mark.parametrize("state", ["starting", "failed"])
def test_one_that_is_not_there_is_left_alone(busy: Replica, state: str) -> None:
    busy.state = state  # type: ignore[assignment]
    assert looks(HangWatch(LIMIT, 0.0), busy, *range(9)) == [""] * 9
