"""`thinking_token_budget`: so many tokens of thought, then the mark that closes it, however the request is served."""

from __future__ import annotations

from typing import Any

import pytest
from ar_adapter import Driver, TinyAdapter, prompts, stage_request, tiny_model
from ar_speculation import Prophet, speculating
from hypothesis import given
from hypothesis import strategies as st

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.sample.thinking import Marks, Thinking
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams

TEXT = frozenset({"text"})
MARKS = ("D", "}~")
"""As `Letters` writes them: token 3, and two tokens."""
CLOSE = [60, 61]
PROMPT = prompts(1, [9])[0]
TOKENS = 20


@pytest.fixture(scope="module")
def adapter() -> TinyAdapter:
    return TinyAdapter(tiny_model("qwen2", seed=7))


def ids(adapter: TinyAdapter, text: str) -> list[int]:
    assert adapter.vocabulary is not None
    return adapter.vocabulary.encode(text)


def driver(adapter: TinyAdapter, **config: Any) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})))


def asked(name: str, *, marks: tuple[str, str] | None = MARKS, seed: int = 3, resume: Any = (), **sampling: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.9, "max_tokens": TOKENS, **sampling})
    request = Request(request_id=name, thought_marks=marks)
    return stage_request(name, request=request, sampling=params, to_client=TEXT, seed=seed, resume=list(resume))


def thought(tokens: list[int]) -> int:
    """Tokens before the closing mark."""
    return next(i for i in range(len(tokens)) if tokens[i : i + 2] == CLOSE)


def write(drive: Driver, budgets: list[int], **more: Any) -> list[list[int]]:
    """Replies to a prompt that leaves a thought open, one per budget."""
    for number, budget in enumerate(budgets):
        drive.add(asked(f"r{number}", seed=number, thinking_token_budget=budget, **more), [*PROMPT, 3])
    results = drive.run()
    assert not any(result.last.error for result in results.values())
    return [results[f"r{number}"].token_ids for number in range(len(budgets))]


def knowing(replies: list[list[int]], truth: float) -> Prophet:
    prophet = Prophet([], truth)
    prophet.known = [[*PROMPT, 3, *reply] for reply in replies]
    return prophet


BUDGETS = [0, 1, 4, 11, -1]


def test_a_thought_is_closed_when_its_tokens_are_spent(adapter: TinyAdapter) -> None:
    free = write(driver(adapter), [-1] * 5)
    bound = write(driver(adapter), BUDGETS)
    for budget, reply, without in zip(BUDGETS, bound, free, strict=True):
        if budget < 0:
            assert reply == without
            continue
        assert thought(reply) == budget
        assert reply[:budget] == without[:budget], "up to there nothing is changed"


def test_what_the_prompt_has_thought_counts(adapter: TinyAdapter) -> None:
    drive = driver(adapter)
    drive.add(asked("r", thinking_token_budget=5), [*PROMPT, 3, 8, 9])
    drive.add(asked("closed", thinking_token_budget=0), [*PROMPT, 3, 8, *CLOSE])
    results = drive.run()
    assert thought(results["r"].token_ids) == 3
    assert results["closed"].token_ids[:2] != CLOSE


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_however_it_is_served(adapter: TinyAdapter, temperature: float) -> None:
    alone = []
    for number, budget in enumerate(BUDGETS):
        drive = driver(adapter)
        drive.add(
            asked("r", seed=number, thinking_token_budget=budget, temperature=temperature, max_tokens=TOKENS),
            [*PROMPT, 3],
        )
        alone.append(drive.run()["r"].token_ids)
    serve = {
        "in a batch": driver(adapter),
        "in pieces": driver(adapter, max_tokens_per_step=4),
        "preempted": driver(adapter, num_blocks=10),
        "true drafts": speculating(adapter, knowing(alone, 1.0)),
        "drafts that lie": speculating(adapter, knowing(alone, 0.6)),
    }
    for how, drive in serve.items():
        assert write(drive, BUDGETS, temperature=temperature) == alone, how
    assert serve["preempted"].engine.stats()["preemptions_total"] > 0
    assert serve["true drafts"].engine.stats()["spec_accepted_tokens_total"] > 0


@pytest.mark.parametrize("had", [1, 3, 4, 5, 9])
def test_after_a_worker_was_lost(adapter: TinyAdapter, had: int) -> None:
    whole = write(driver(adapter), [4])[0]
    drive = driver(adapter)
    drive.add(asked("r", seed=0, resume=whole[:had], thinking_token_budget=4), [*PROMPT, 3])
    assert drive.run()["r"].token_ids == whole


def test_it_comes_whatever_is_forbidden(adapter: TinyAdapter) -> None:
    for forbids in ({"suppress_tokens": CLOSE}, {"allowed_token_ids": [5, 6, 7]}, {"beam_width": 3}):
        more = {"temperature": 0.0} if "beam_width" in forbids else {}
        assert thought(write(driver(adapter), [3], **forbids, **more)[0]) <= 3


def test_several_outputs(adapter: TinyAdapter) -> None:
    drive = driver(adapter)
    drive.add(asked("r", thinking_token_budget=6, n=3), [*PROMPT, 3])
    replies = [result.token_ids for name, result in drive.run().items() if name.startswith("r")]
    assert len(replies) == 3
    assert all(thought(reply) <= 6 for reply in replies)


def test_a_model_that_marks_none(adapter: TinyAdapter) -> None:
    with pytest.raises(InvalidRequest, match="marks no reasoning") as caught:
        driver(adapter).add(asked("r", marks=None, thinking_token_budget=6), PROMPT)
    assert caught.value.field == "sampling.main.thinking_token_budget"


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=24),
    st.integers(0, 5),
    st.sampled_from([((1,), (2,)), ((1,), (2, 3)), ((1, 1), (2, 2, 3))]),
)
def test_no_more_is_thought_than_may_be(
    prompt: list[int], wishes: list[int], most: int, ways: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Where forced tokens come, the state after them is that of a place that saw them all at once."""
    marks = Marks(*ways, most)
    place, emitted = Thinking(marks, prompt), []
    for wish in wishes:
        token = wish if place.forced is None else place.forced
        emitted.append(token)
        place.saw(token)
    assert Thinking(marks, prompt).after(emitted).forced == place.forced
    inside, count = place._inside, place._count
    assert not inside or count <= max(most, len(prompt)) + len(marks.close)
