"""Beam search with structured output: every beam has a place of its own in the grammar."""

from __future__ import annotations

import re

import pytest
from ar_adapter import branch, logprobs_of, stage_request
from ar_words import END, PROMPT, TEXT, WordAdapter, driver, finish, word_adapter

from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams, StructuredOutput

TEXTS = ["cat!", "dog?", "horse", "mouse"]


@pytest.fixture(scope="module")
def adapter() -> WordAdapter:
    return word_adapter()


def search(adapter: WordAdapter, form: StructuredOutput, *names: str, config=None, **sampling):
    """By name, the outputs of a search, best first: (text, tokens, reason, score) each."""
    params = SamplingParams(**{"beam_width": 4, "n": 4, "length_penalty": 0.0, "max_tokens": 16, **sampling})
    params = SamplingParams(structured_outputs=form).over(params)
    drive, there = driver(adapter, **(config or {}))
    for number, name in enumerate(names):
        drive.add(stage_request(name, sampling=params, to_client=TEXT), PROMPT[number:])
    finish(drive, there, [branch(name, index) for name in names for index in range(params.n or 1)])
    stats = drive.engine.stats()
    assert stats["blocks_used"] == 0
    found = {}
    for name in names:
        ours = [drive.results[branch(name, index)] for index in range(params.n or 1)]
        found[name] = [(one.text, one.token_ids, one.last.finish_reason, one.last.cumulative_logprob) for one in ours]
    return found, stats


def test_as_many_beams_as_texts_rank_them_all(adapter: WordAdapter) -> None:
    """Nothing is dropped: the scores are those of the library for each text."""
    ids = {text: [*adapter.vocabulary.encode(text), END] for text in TEXTS}
    expected = {text: float(logprobs_of(adapter.model, PROMPT, ids[text]).sum()) for text in TEXTS}
    ranked = sorted(TEXTS, key=lambda text: -expected[text])
    found, _ = search(adapter, StructuredOutput(choice=TEXTS), "it")
    assert [text for text, *_ in found["it"]] == ranked
    assert [tokens for _, tokens, *_ in found["it"]] == [ids[text] for text in ranked]
    assert all(reason == "stop" for *_, reason, _ in found["it"])
    assert [score for *_, score in found["it"]] == pytest.approx([expected[text] for text in ranked], abs=1e-3)


EXPRESSION = "(red|blue|green){2}-[0-9]{2,3}"


def test_however_it_is_served(adapter: WordAdapter) -> None:
    form = StructuredOutput(regex=EXPRESSION)
    alone, _ = search(adapter, form, "it")
    together, _ = search(adapter, form, "it", "second", "third")
    cramped, stats = search(adapter, form, "it", "second", "third", config={"num_blocks": 13})
    assert stats["preemptions_total"] > 0
    for outputs in (*together.values(), *cramped.values()):
        assert len({text for text, *_ in outputs}) == 4
        assert all(re.fullmatch(EXPRESSION, text) for text, *_ in outputs)
    assert [tokens for _, tokens, *_ in together["it"]] == [tokens for _, tokens, *_ in alone["it"]]
    for name, outputs in cramped.items():
        assert [tokens for _, tokens, *_ in outputs] == [tokens for _, tokens, *_ in together[name]]


def test_fewer_texts_than_beams(adapter: WordAdapter) -> None:
    """Beams for which nothing is left disturb no other."""
    found, _ = search(adapter, StructuredOutput(choice=["cat!", "dog?"]), "it", n=2, max_tokens=8)
    assert {text for text, *_ in found["it"]} == {"cat!", "dog?"}
    params = SamplingParams(beam_width=4, n=4, structured_outputs=StructuredOutput(choice=["cat!", "dog?"]))
    drive, there = driver(adapter)
    drive.add(stage_request("it", sampling=SamplingParams(max_tokens=8).over(params), to_client=TEXT), PROMPT)
    finish(drive, there, ["it"])
    error = drive.results["it"].last.error
    assert isinstance(error, InvalidRequest)
    assert "leave 2 outputs of 4" in error.message
