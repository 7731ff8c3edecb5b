"""Structured output: texts are in their form, whatever the weights say."""

from __future__ import annotations

import json
import re

import pytest
from ar_adapter import branch, stage_request
from ar_words import END, PROMPT, TEXT, WORDS, WordAdapter, driver, finish, word_adapter, write

from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams, StructuredOutput


@pytest.fixture(scope="module")
def adapter():
    return word_adapter()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("expression", ["(yes|no) [0-9]{2,4}!", "[a-f]{8}", "(tr|true)+ab?x"])
def test_regex(adapter, expression, temperature):
    results = write(adapter, {"regex": expression}, temperature=temperature)
    ended = [result for result in results if result.last.finish_reason == "stop"]
    assert ended
    assert all(re.fullmatch(expression, result.text) and result.token_ids[-1] == END for result in ended)


def test_choice(adapter):
    texts = ['say "hi"', "a\\b", "true or not", "\u00e9t\u00e9"[:2]]
    results = write(adapter, {"choice": texts}, seeds=range(12), temperature=1.5)
    assert all(result.text in texts and result.last.finish_reason == "stop" for result in results)
    assert len({result.text for result in results}) > 1


SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["ab", "cd"]},
        "at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3},
    },
    "required": ["ok", "kind", "at"],
}


@pytest.mark.parametrize("written", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_json_schema(adapter, written):
    # spaces are allowed nearly everywhere; tiny weights would write nothing else
    results = write(adapter, {"json": written}, most=200, suppress_tokens=[WORDS.index(" ")])
    for result in results:
        value = json.loads(result.text)
        assert set(value) == {"ok", "kind", "at"}
        assert value["kind"] in ("ab", "cd")
        assert 2 <= len(value["at"]) <= 3


def test_any_json_object(adapter):
    quote = WORDS.index('"')
    [result] = write(adapter, {"json_object": True}, seeds=[5], most=200, logit_bias={quote: 8, WORDS.index("}"): 9})
    assert isinstance(json.loads(result.text), dict)


def test_json_without_spare_spaces(adapter):
    for result in write(adapter, {"json": SCHEMA, "disable_any_whitespace": True}, most=200):
        assert result.text == json.dumps(json.loads(result.text))


CALL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TAGS = [
    {"structures": [{"begin": "<f>", "schema": CALL, "end": "</f>"}], "triggers": ["<f"]},
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [
                {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": CALL}, "end": "</f>"}
            ],
        },
    },
]


@pytest.mark.parametrize("tag", [*TAGS, json.dumps(TAGS[1])], ids=["structures", "format", "text"])
def test_a_structural_tag(adapter, tag):
    """Text is free until a trigger; from there on it is a call."""
    ids = {name: WORDS.index(name) for name in ("<", "f", ">", " ")}
    favoured = {"logit_bias": {ids["<"]: 9.0, ids["f"]: 8.0}, "suppress_tokens": [ids[" "]]}
    results = write(adapter, {"structural_tag": tag}, seeds=range(6), temperature=1.0, most=120, **favoured)
    calls = [call for result in results for call in re.findall("<f(.*?)</f>", result.text)]
    assert calls, [result.text for result in results]
    assert all(call[0] == ">" and set(json.loads(call[1:])) == {"ok"} for call in calls)
    assert any(result.text.partition("<f")[0] for result in results), "free text comes before"


def test_grammar(adapter):
    rules = 'root ::= "(" root ")" | "ab"'
    results = write(adapter, {"grammar": rules}, seeds=range(6))
    ended = [result.text for result in results if result.last.finish_reason == "stop"]
    assert ended
    assert all(text == "(" * depth + "ab" + ")" * depth for text in ended for depth in [(len(text) - 2) // 2])


def test_without_the_form_the_text_is_another(adapter):
    """The weights write none of this by themselves."""
    drive, _ = driver(adapter)
    drive.add(stage_request("it", sampling=SamplingParams(max_tokens=20), to_client=TEXT, seed=1), PROMPT)
    assert not re.match("(yes|no) ", drive.run()["it"].text)


def test_neighbours_without_a_form_are_untouched(adapter):
    plain = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    alone, _ = driver(adapter)
    alone.add(stage_request("plain", sampling=plain), PROMPT)
    expected = alone.run()["plain"].token_ids
    drive, there = driver(adapter)
    for name, sampling in (
        ("one", SamplingParams(max_tokens=30, structured_outputs=StructuredOutput(regex="[a-c]{5}"))),
        ("plain", plain),
        ("two", SamplingParams(max_tokens=30, structured_outputs=StructuredOutput(choice=["x", "yy"]))),
    ):
        drive.add(stage_request(name, sampling=sampling, to_client=TEXT), PROMPT)
    finish(drive, there, ["one", "plain", "two"])
    assert drive.results["plain"].token_ids == expected
    assert re.fullmatch("[a-c]{5}", drive.results["one"].text)
    assert drive.results["two"].text in ("x", "yy")


def test_a_text_cut_off_by_its_length(adapter):
    [result] = write(adapter, {"regex": "[a-z]{50}"}, seeds=[1], most=7)
    assert (len(result.token_ids), result.last.finish_reason) == (7, "length")
    assert result.text.isalpha()


def test_without_an_end_token_it_ends_where_nothing_can_follow(adapter):
    endless = WordAdapter(adapter.model)
    endless.end_token_ids = frozenset()
    [result] = write(endless, {"regex": "ab?c|abd"}, seeds=[1])
    assert re.fullmatch("ab?c|abd", result.text)
    assert result.last.finish_reason == "stop"


def test_the_end_of_the_grammar_is_the_end_with_ignore_eos_too(adapter):
    [result] = write(adapter, {"choice": ["ab"]}, seeds=[1], ignore_eos=True)
    assert (result.text, result.last.finish_reason) == ("ab", "stop")


def test_a_minimum_that_the_form_cannot_reach(adapter):
    [result] = write(adapter, {"choice": ["ab"]}, seeds=[1], min_tokens=9)
    assert isinstance(result.last.error, InvalidRequest)
    assert "forbid every token" in result.last.error.message


def test_logprobs_are_those_of_the_model(adapter):
    [result] = write(adapter, {"choice": ["zq~"]}, seeds=[1], logprobs=1, temperature=0.0)
    ranks = [one.chosen.rank for output in result.outputs for one in output.logprobs]
    assert max(ranks) > 1  # the model would have said something else


@pytest.mark.parametrize("done", range(1, 5))
def test_resumed(adapter, done):
    form = StructuredOutput(regex="[a-f]{4}(x|y)")
    sampling = SamplingParams(temperature=0.9, max_tokens=60, structured_outputs=form)
    drive, there = driver(adapter)
    drive.add(stage_request("whole", sampling=sampling, to_client=TEXT, seed=3), PROMPT)
    finish(drive, there, ["whole"])
    whole = drive.results["whole"]
    drive.add(stage_request("again", sampling=sampling, to_client=TEXT, seed=3, resume=whole.token_ids[:done]), PROMPT)
    finish(drive, there, ["again"])
    assert drive.results["again"].token_ids == whole.token_ids
    assert drive.results["again"].text == whole.text


def test_several_outputs_each_in_the_form(adapter):
    form = StructuredOutput(regex="[a-f]{4}(x|y)")
    sampling = SamplingParams(temperature=0.9, max_tokens=60, structured_outputs=form, n=4)
    single = write(adapter, {"regex": "[a-f]{4}(x|y)"}, seeds=(3, 4, 5, 6), temperature=0.9, most=60)
    whole = [one.token_ids for one in single]
    names = [branch("it", index) for index in range(4)]
    for resume in ({}, {"resume": whole[0][:2], "resume_others": [whole[1][:4], [], whole[3][:1]]}):
        drive, there = driver(adapter)
        drive.add(stage_request("it", sampling=sampling, to_client=TEXT, seed=3, **resume), PROMPT)
        finish(drive, there, names)
        assert [drive.results[name].token_ids for name in names] == whole


def test_a_journal_that_does_not_fit_fails_its_request(adapter):
    sampling = SamplingParams(structured_outputs=StructuredOutput(choice=["ab"]))
    drive, there = driver(adapter)
    drive.add(stage_request("it", sampling=sampling, to_client=TEXT, resume=[5, 6]), PROMPT)
    finish(drive, there, ["it"])
    assert isinstance(drive.results["it"].last.error, StageFailed)


def test_after_preemption(adapter):
    sampling = SamplingParams(temperature=0.9, max_tokens=40, structured_outputs=StructuredOutput(regex="[a-f]{30}!"))
    outcomes = []
    for blocks in (200, 9):
        drive, there = driver(adapter, num_blocks=blocks)
        for seed in range(3):
            drive.add(stage_request(f"r{seed}", sampling=sampling, to_client=TEXT, seed=seed), PROMPT)
        finish(drive, there, ["r0", "r1", "r2"])
        outcomes.append([drive.results[f"r{seed}"].token_ids for seed in range(3)])
    assert drive.engine.stats()["preemptions_total"] > 0
    assert outcomes[0] == outcomes[1]
