"""A thought and then a form: structured output begins behind the mark that closes a thought, however it is served."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from ar_adapter import Driver, stage_request
from ar_speculation import Prophet
from ar_words import END, PROMPT, TEXT, WORDS, WordAdapter, driver, finish, word_adapter

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams, StructuredOutput

MARKS = ("#", "};")
OPEN, CLOSE = WORDS.index("#"), [WORDS.index("}"), WORDS.index(";")]
FORM = {"regex": "[ab]{12,16}"}
BUDGETS = [0, 1, 4, 11]


@pytest.fixture(scope="module")
def adapter() -> WordAdapter:
    return word_adapter()


def asked(name: str, *, seed: int = 3, resume: Any = (), marks: Any = MARKS, form: Any = None, **sampling: Any) -> Any:
    held = StructuredOutput(**(form or FORM))
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 40, "structured_outputs": held, **sampling})
    request = Request(request_id=name, thought_marks=marks)
    return stage_request(name, request=request, sampling=params, to_client=TEXT, seed=seed, resume=list(resume))


def write(drive: Driver, there: threading.Event, budgets: list[int | None] = BUDGETS, **more: Any) -> list[list[int]]:  # type: ignore[assignment]
    """Replies to a prompt that leaves a thought open, one per budget."""
    names = [f"r{number}" for number in range(len(budgets))]
    for number, budget in enumerate(budgets):
        drive.add(asked(names[number], seed=number, thinking_token_budget=budget, **more), [*PROMPT, OPEN])
    finish(drive, there, names)
    assert not any(drive.results[name].last.error for name in names)
    return [drive.results[name].token_ids for name in names]


def parted(reply: list[int]) -> tuple[int, str]:
    """(tokens of the thought, the text behind it)."""
    thought = next(i for i in range(len(reply)) if reply[i : i + 2] == CLOSE)
    return thought, "".join(WORDS[token] for token in reply[thought + 2 :] if token != END)


def check(replies: list[list[int]]) -> None:
    for budget, reply in zip(BUDGETS, replies, strict=True):
        thought, text = parted(reply)
        assert thought == budget
        assert END not in reply[:thought]
        assert re.fullmatch(FORM["regex"], text)


@pytest.fixture(scope="module")
def alone(adapter: WordAdapter) -> list[list[int]]:
    """One by one."""
    drive, there = driver(adapter)
    replies = []
    for number, budget in enumerate(BUDGETS):
        drive.add(asked(f"r{number}", seed=number, thinking_token_budget=budget), [*PROMPT, OPEN])
        finish(drive, there, [f"r{number}"])
        replies.append(drive.results[f"r{number}"].token_ids)
    check(replies)
    return replies


@pytest.mark.parametrize("config", [{}, {"max_tokens_per_step": 4}, {"num_blocks": 7}], ids=str)
def test_the_form_begins_behind_the_thought(
    adapter: WordAdapter, alone: list[list[int]], config: dict[str, int]
) -> None:
    drive, there = driver(adapter, **config)
    assert write(drive, there) == alone
    assert (drive.engine.stats()["preemptions_total"] > 0) == ("num_blocks" in config)


@pytest.mark.parametrize("truth", [1.0, 0.6])
def test_with_drafts(adapter: WordAdapter, alone: list[list[int]], truth: float) -> None:
    """Also such as reach over the mark, and such as are wrong on either side of it."""
    prophet = Prophet([], truth)
    prophet.known = [[*PROMPT, OPEN, *reply] for reply in alone]
    there = threading.Event()
    sizes = AutoregressiveConfig(num_blocks=200, block_size=8)
    engine = AutoregressiveEngine(
        adapter, sizes, Grammars.of(adapter, there.set), speculation=Speculation(prophet, 4, adaptive=False)
    )
    drive = Driver(engine)
    assert write(drive, there) == alone
    assert drive.engine.stats()["spec_accepted_tokens_total"] > 0


@pytest.mark.parametrize("had", [1, 3, 4, 5, 6, 7, 8])
def test_after_a_worker_was_lost(adapter: WordAdapter, alone: list[list[int]], had: int) -> None:
    drive, there = driver(adapter)
    drive.add(asked("r", seed=2, resume=alone[2][:had], thinking_token_budget=4), [*PROMPT, OPEN])
    finish(drive, there, ["r"])
    assert drive.results["r"].token_ids == alone[2]


@pytest.mark.parametrize(
    "more", [{"n": 3}, {"n": 2, "best_of": 3}, {"n": 3, "beam_width": 3, "temperature": 0.0}], ids=str
)
def test_several_outputs(adapter: WordAdapter, more: dict[str, Any]) -> None:
    drive, there = driver(adapter)
    drive.add(asked("r", thinking_token_budget=6, **more), [*PROMPT, OPEN])
    finish(drive, there, ["r"])
    replies = [result.token_ids for name, result in drive.results.items() if name.startswith("r")]
    assert len(replies) == more["n"]
    for reply in replies:
        thought, text = parted(reply)
        assert thought <= 6
        assert re.fullmatch(FORM["regex"], text)


def test_an_open_thought_comes_first_without_a_bound_too(adapter: WordAdapter) -> None:
    for budget in (None, -1):
        drive, there = driver(adapter)
        [reply] = write(drive, there, [budget], logit_bias={CLOSE[0]: 3.0, CLOSE[1]: 3.0}, max_tokens=200)
        assert re.fullmatch(FORM["regex"], parted(reply)[1])


@pytest.mark.parametrize("opening", ["#", "#~"])
def test_a_reply_may_begin_a_thought_of_its_own(adapter: WordAdapter, opening: str) -> None:
    wish: dict[str, Any] = {"logit_bias": {OPEN: 100.0}, "marks": (opening, MARKS[1])}
    drive, there = driver(adapter)
    drive.add(asked("thinks", thinking_token_budget=5, **wish), PROMPT)
    drive.add(asked("no budget", **wish), PROMPT)
    drive.add(asked("none left", thinking_token_budget=0, **wish), PROMPT)
    drive.add(asked("form", thinking_token_budget=5, form={"regex": "#a"}, **wish), PROMPT)
    drive.add(asked("no wish", thinking_token_budget=5, **{**wish, "logit_bias": {OPEN: -100.0}}), PROMPT)
    finish(drive, there, ["thinks", "no budget", "none left", "form", "no wish"])
    replies = {name: result.token_ids for name, result in drive.results.items()}
    assert "".join(WORDS[token] for token in replies["thinks"][: len(opening)]) == opening
    thought, text = parted(replies["thinks"])
    assert thought == len(opening) + 5
    assert re.fullmatch(FORM["regex"], text)
    texts = {name: "".join(WORDS[token] for token in ids if token != END) for name, ids in replies.items()}
    assert texts["form"] == "#a", "what the form's own text can begin with opens no thought"
    for name in ("no budget", "none left", "no wish"):
        assert re.fullmatch(FORM["regex"], texts[name])


def test_a_model_that_marks_none(adapter: WordAdapter) -> None:
    drive, there = driver(adapter)
    with pytest.raises(InvalidRequest, match="marks no reasoning"):
        drive.add(asked("r", marks=None, thinking_token_budget=6), PROMPT)
    drive.add(asked("free", marks=None, thinking_token_budget=-1), PROMPT)
    finish(drive, there, ["free"])
    text = "".join(WORDS[token] for token in drive.results["free"].token_ids if token != END)
    assert re.fullmatch(FORM["regex"], text)
