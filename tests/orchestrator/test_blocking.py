"""`Omni` over many prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_system import assert_right

from segue import Omni
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.orchestrator.omni.outputs import RequestOutput

FEW: dict[str, Any] = {"limits": {"max_waiting": 3}}
FAILS = {
    "messages": [{"role": "user", "content": "this one fails"}],
    "options": {"fail_at": {"stage": "tone", "at": 2}},
    "modalities": ["audio"],
}


@pytest.fixture(scope="module")
def omni(toy_dir: Path) -> Iterator[Omni]:
    with Omni(toy_dir, config=FEW, progress=False) as omni:
        yield omni


def test_more_prompts_than_may_wait(omni: Omni) -> None:
    texts = [f"text {number}" for number in range(10)]
    for text, output in zip(texts, omni.generate(texts), strict=True):
        assert_right(output, text)


def test_a_wrong_prompt_is_told_before_any_runs(omni: Omni) -> None:
    def prompts() -> Iterator[Any]:
        yield from ("one", "two", {"prompt": "three", "voise": "one"})

    with pytest.raises(
        InvalidRequest, match=r"prompts\[2\]: a request has no key 'voise'; did you mean 'voice'"
    ) as told:
        omni.generate(prompts())
    assert told.value.field == "voise"


def test_outputs_as_they_end(omni: Omni) -> None:
    """One that fails, and one that is wrong, cost the others nothing."""
    prompts = [f"text {number}" for number in range(6)]
    given: list[Any] = [*prompts[:2], FAILS, *prompts[2:4], {"messages": [], "voise": "one"}, *prompts[4:]]
    results = dict(omni.as_completed(iter(given)))
    assert sorted(results) == list(range(8))
    for place, prompt in enumerate(given):
        result = results[place]
        if isinstance(prompt, str):
            assert isinstance(result, RequestOutput)
            assert_right(result, prompt)
    assert isinstance(results[2], StageFailed)
    assert isinstance(results[5], InvalidRequest)


def test_prompts_are_taken_when_there_is_room(omni: Omni) -> None:
    taken = []

    def prompts() -> Iterator[str]:
        for number in range(100):
            taken.append(number)
            yield f"text {number}"

    results: list[tuple[int, RequestOutput | SegueError]] = []
    running = omni.as_completed(prompts())
    results.append(next(running))
    assert 1 <= (before := len(taken)) <= 3  # fewer where the first ends while others are taken
    running.close()
    assert len(taken) == before
    [output] = omni.generate("and it goes on")
    assert_right(output, "and it goes on")


def test_prompts_that_break_off(omni: Omni) -> None:
    def prompts() -> Iterator[str]:
        yield from ("one", "two")
        raise ValueError("line 3 is no JSON")

    running = omni.as_completed(prompts())
    assert sorted(next(running)[0] for _ in range(2)) == [0, 1]
    with pytest.raises(ValueError, match="line 3"):
        next(running)


def test_a_text_is_one_prompt(omni: Omni) -> None:
    [(place, output)] = omni.as_completed("one text")
    assert place == 0
    assert isinstance(output, RequestOutput)
    assert_right(output, "one text")


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        ("x", {"max_tokens": 5}, r"write sampling=SamplingParams\(max_tokens=5\)"),
        (
            "x",
            {"sampling": {"max_tokens": 5}},
            r"write SamplingParams\(max_tokens=…\), or \{'counter': \{",
        ),
        ([[1, 2, 3]], {}, r"the prompt is \[1, 2, 3\]; it must be text, or a dict with one of 'messages'"),
    ],
)
def test_what_others_write_is_told_how_it_is_written_here(
    omni: Omni, prompt: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        omni.generate(prompt, **settings)
