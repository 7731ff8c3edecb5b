"""Sequences that are kept after the end of their requests: those that go on from them compute only what is new, and
nobody else pays for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from ar_adapter import Driver, TinyAdapter, prompts, stage_request, tiny_model
from ar_open import answer
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import StageRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
LONG, OTHER, ASIDE = prompts(3, (60, 33, 150))
FIRST, MORE, ELSE = LONG[:21], LONG[21:25], LONG[25:31]
SIZES = {"num_blocks": 64, "block_size": 4}
HELD = 7
"""Blocks of `FIRST` and its reply, whose last token is not computed."""


@cache
def adapter() -> TinyAdapter:
    return TinyAdapter(tiny_model())


@cache
def alone() -> Driver:
    return driver(prefix_caching=False)


def driver(*, ahead: bool = False, clock: Any = None, **config: Any) -> Driver:
    given = {} if clock is None else {"clock": clock}
    engine = AutoregressiveEngine(adapter(), AutoregressiveConfig(**{**SIZES, **config}), ahead=ahead, **given)
    return Driver(engine)


def kept(name: str, **fields: Any) -> StageRequest:
    return stage_request(name, request=Request(request_id=name, keep=name), **{"sampling": GREEDY, **fields})


def told(drive: Driver, name: str = "first") -> list[int]:
    """Run a request that is kept; return all that a successor's prompt begins with."""
    drive.add(kept(name), FIRST)
    drive.run()
    assert drive.results[name].last.finished
    return [*FIRST, *drive.results[name].token_ids]


def held(drive: Driver) -> tuple[float, float, float]:
    stats = drive.engine.stats()
    return stats["holding"], stats["held_blocks"], stats["waiting"]


@pytest.mark.parametrize("ahead", [False, True])
def test_successors_share_what_is_held_and_compute_what_is_new(ahead: bool) -> None:
    drive = driver(ahead=ahead)
    said = told(drive)
    assert held(drive) == (1, HELD, 0)
    for turn in range(6):  # enough to use each free block again
        drive.add(stage_request(f"aside {turn}", sampling=GREEDY), [turn + 1, *ASIDE])
        drive.run()
    before = drive.engine.stats()["prefix_hit_tokens_total"]
    both = {"this": [*said, *MORE], "that": [*said, *ELSE]}
    for name, prompt in both.items():
        drive.add(stage_request(name, sampling=GREEDY), prompt)
    drive.run()
    shared = (len(said) - 1) // 4 * 4
    assert drive.engine.stats()["prefix_hit_tokens_total"] - before == 2 * shared
    for name, prompt in both.items():
        assert drive.results[name].token_ids == answer(alone(), prompt, GREEDY)
    assert held(drive) == (1, HELD, 0)


def test_others_take_what_is_held_when_they_need_it() -> None:
    drive = driver(num_blocks=30)
    said = told(drive)
    drive.add(stage_request("large", sampling=GREEDY), [*OTHER, *LONG])
    drive.run()
    assert drive.results["large"].token_ids == answer(alone(), [*OTHER, *LONG], GREEDY)
    assert held(drive) == (0, 0, 0)
    assert drive.engine.stats()["blocks_used"] == 0
    drive.add(stage_request("late", sampling=GREEDY), [*said, *MORE])
    drive.run()
    assert drive.results["late"].token_ids == answer(alone(), [*said, *MORE], GREEDY)


def test_it_is_given_back_after_the_deadline() -> None:
    now = [100.0]
    drive = driver(clock=lambda: now[0], hold_seconds=5.0)
    told(drive)
    drive.add(stage_request("other", sampling=GREEDY), OTHER)
    now[0] += 4.0
    drive.step()
    assert held(drive)[:2] == (1, HELD)
    now[0] += 2.0
    drive.run()
    assert held(drive) == (0, 0, 0)
    stats = drive.engine.stats()
    assert (stats["holds_expired_total"], stats["blocks_used"]) == (1, 0)
    assert not drive.engine.has_work()


def test_a_new_attempt_takes_the_place_of_the_old_one() -> None:
    drive = driver()
    said = told(drive)
    drive.engine.cancel("first")  # the request is dropped where it ended; what is kept stays
    assert held(drive) == (1, HELD, 0)
    drive.results.clear()
    drive.add(kept("first", resume=said[len(FIRST) : -2]), FIRST)
    drive.run()
    assert [*FIRST, *drive.results["first"].token_ids] == said
    assert held(drive) == (1, HELD, 0)


@pytest.mark.parametrize(
    ("config", "sampling"),
    [({"prefix_caching": False}, GREEDY), ({}, SamplingParams(temperature=1.0, max_tokens=6, n=2))],
    ids=["nobody could find it", "several outputs"],
)
def test_what_is_not_kept(config: dict[str, Any], sampling: SamplingParams) -> None:
    drive = driver(**config)
    drive.add(kept("first", sampling=sampling), FIRST)
    drive.run()
    assert held(drive) == (0, 0, 0)
    assert drive.engine.stats()["blocks_used"] == 0


CALLS = st.lists(
    st.tuples(st.sampled_from(("begin", "follow", "follow", "cancel", "step", "step")), st.integers(0, 7)), max_size=16
)


@settings(max_examples=12, deadline=None)
@given(CALLS, st.booleans())
def test_random_successors_of_kept_requests(calls: list[tuple[str, int]], ahead: bool) -> None:
    """In a cache that is too small for all; the books are audited after each step."""
    drive = driver(num_blocks=16, ahead=ahead)
    asked: dict[str, list[int]] = {}
    for number, (call, one) in enumerate(calls):
        ended = [name for name in asked if name in drive.results and drive.results[name].last.finished]
        prompt: list[int] = []
        if call == "begin":
            prompt = LONG[one : one + 9]
        elif call == "follow" and ended:
            before = ended[one % len(ended)]
            prompt = [*asked[before], *drive.results[before].token_ids, one + 1]
        elif call == "cancel" and asked:
            drive.engine.cancel(list(asked)[one % len(asked)])
        for _ in range(one if call == "step" and drive.engine.has_work() else 0):
            drive.step()
        if 0 < len(prompt) < 56:
            asked[f"r{number}"] = prompt
            drive.add(kept(f"r{number}"), prompt)
    drive.run()
    for name, prompt in asked.items():
        if name in drive.results and drive.results[name].last.finished:
            assert drive.results[name].token_ids == answer(alone(), prompt, GREEDY)
