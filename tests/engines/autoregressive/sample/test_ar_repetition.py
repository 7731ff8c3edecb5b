"""`repetition_detection`: an output that goes round in circles ends."""

from __future__ import annotations

from typing import Any

import pytest
from ar_adapter import TinyAdapter, generate, stage_request, tiny_model
from ar_speculation import PROMPTS, Prophet, plainly, speculating
from hypothesis import given
from hypothesis import strategies as st

from segue.engines.autoregressive.step.outputs import repeats
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import RepetitionDetection, SamplingParams, check_sampling

TOKENS = 24
CIRCLES = {7, 8, 9}
"""With only these tokens, greedy output goes round soon."""


@pytest.fixture(scope="module")
def adapter() -> TinyAdapter:
    return TinyAdapter(tiny_model("qwen2", seed=7))


def write(adapter: TinyAdapter, drive: Any = None, resume: Any = (), **sampling: Any) -> Any:
    drive = drive or plainly(adapter)
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": TOKENS, "allowed_token_ids": sorted(CIRCLES), **sampling}
    )
    text = frozenset({"text"})
    drive.add(stage_request("it", sampling=params, to_client=text, resume=list(resume)), PROMPTS[0])
    return drive.run()["it"]


def found(ids: list[int], asked: RepetitionDetection) -> int:
    """Tokens until the first repetition, in the words of its definition."""
    for end in range(1, len(ids) + 1):
        for size in range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1):
            part = ids[max(0, end - size * asked.min_count) : end]
            if len(part) == size * asked.min_count and part == part[:size] * asked.min_count:
                return end
    return len(ids)


def test_it_ends_with_the_first_repetition(adapter: TinyAdapter) -> None:
    free = write(adapter)
    asked = RepetitionDetection(max_pattern_size=3, min_count=2)
    bound = write(adapter, repetition_detection=asked)
    count = found(free.token_ids, asked)
    assert count < TOKENS
    assert bound.token_ids == free.token_ids[:count]
    assert (bound.last.finish_reason, bound.last.stop_reason) == ("repetition", "repetition_detected")
    assert bound.text == free.text[:count]
    later = write(adapter, repetition_detection=asked, min_tokens=count + 2)
    assert len(later.token_ids) >= count + 2
    assert later.token_ids == free.token_ids[: len(later.token_ids)]
    drafted = write(adapter, speculating(adapter, Prophet([free.token_ids])), repetition_detection=asked)
    assert drafted.token_ids == bound.token_ids
    resumed = write(adapter, resume=free.token_ids[: count - 2], repetition_detection=asked)
    assert resumed.token_ids == bound.token_ids


def test_the_end_by_length_comes_first(adapter: TinyAdapter) -> None:
    asked = RepetitionDetection(max_pattern_size=3, min_count=2)
    count = found(write(adapter).token_ids, asked)
    assert write(adapter, repetition_detection=asked, max_tokens=count).last.finish_reason == "length"


def test_what_does_not_repeat_goes_on(adapter: TinyAdapter) -> None:
    answer = generate(adapter.model, PROMPTS[0], TOKENS)
    asked = RepetitionDetection(max_pattern_size=8, min_pattern_size=3, min_count=3)
    assert found(answer, asked) == TOKENS
    assert write(adapter, repetition_detection=asked, allowed_token_ids=None).token_ids == answer


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(0, 4), st.integers(0, 4), st.integers(2, 4))
def test_what_a_repetition_is(ids: list[int], one: int, other: int, count: int) -> None:
    asked = RepetitionDetection(max_pattern_size=max(one, other), min_pattern_size=min(one, other), min_count=count)
    sizes = range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1)
    expected = any(len(ids) >= size * count and ids[-size * count :] == ids[-size:] * count for size in sizes)
    assert repeats(ids, asked) == expected


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_pattern_size": 3}, "min_count"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 1024, "min_count": 11}, "min_count"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": -1, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, int], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(SamplingParams(repetition_detection=RepetitionDetection(**values)), "here")
    assert caught.value.field == f"here.repetition_detection.{name}"


def test_not_of_beams() -> None:
    asked = RepetitionDetection(max_pattern_size=2, min_count=2)
    with pytest.raises(InvalidRequest, match="cannot be combined with beam_width"):
        check_sampling(SamplingParams(repetition_detection=asked, beam_width=2), "here")
