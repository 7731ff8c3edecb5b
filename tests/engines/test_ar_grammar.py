"""Structured output: texts are in their form, whatever the weights say, and compiling one holds up nobody else."""

from __future__ import annotations

import json
import re
import threading
from itertools import count
from typing import Any

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, branch, prompts, stage_request, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive import grammar as module
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar import Grammars, blank_mask
from segue.engines.autoregressive.json_schema import unsupported
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams, StructuredOutput

PROMPT = prompts(1, [9])[0]
TEXT = frozenset({"text"})
END = 0
WORDS = ["", *(chr(code) for code in range(32, 127)), "true", '": ', '{"', "ab", "\u00e9"]
"""Printable characters and some longer tokens; id 0 ends the output."""


class Words:
    """The vocabulary of `WORDS`."""

    def token_bytes(self, token_ids) -> list[bytes]:
        return [WORDS[token].encode() if token < len(WORDS) else b"" for token in token_ids]

    def name(self, token_id: int) -> str:
        return "<end>"

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(letter) for letter in text]


class WordAdapter(TinyAdapter):
    """Writes `WORDS`; its vocabulary has rows that no token has."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.vocabulary = Words()
        self.end_token_ids = frozenset({END})

    def decode_text(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join(WORDS[token] for token in token_ids if token < len(WORDS))


@pytest.fixture(scope="module")
def adapter():
    return WordAdapter(tiny_model("qwen2", seed=7, vocab_size=110))


def driver(adapter, grammars: Grammars | None = None, **config) -> tuple[Driver, threading.Event]:
    """And the event of a grammar's being there."""
    there = threading.Event()
    made = grammars or Grammars.of(adapter, there.set)
    config = AutoregressiveConfig(**{"num_blocks": 200, "block_size": 8, **config})
    return Driver(AutoregressiveEngine(adapter, config, made)), there


def finish(drive: Driver, there: threading.Event, ids) -> None:
    """Run until all of `ids` are finished; wait for grammars where nothing else can run."""
    while True:
        drive.run()
        left = [name for name in ids if name not in drive.results or not over(drive.results[name])]
        if not left:
            return
        assert there.wait(20)
        there.clear()


def over(result) -> bool:
    return result.last.finished or result.last.error is not None


def write(adapter, form: dict[str, Any], seeds=(1, 2, 3), most=120, **sampling):
    drive, there = driver(adapter)
    asked = StructuredOutput(**form)
    for seed in seeds:
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": most, "structured_outputs": asked, **sampling})
        drive.add(stage_request(f"r{seed}", sampling=params, to_client=TEXT, seed=seed), PROMPT)
    finish(drive, there, [f"r{seed}" for seed in seeds])
    return [drive.results[f"r{seed}"] for seed in seeds]


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("expression", ["(yes|no) [0-9]{2,4}!", "[a-f]{8}", "(tr|true)+ab?x"])
def test_regex(adapter, expression, temperature):
    for result in write(adapter, {"regex": expression}, temperature=temperature):
        if result.last.finish_reason == "stop":
            assert re.fullmatch(expression, result.text)
            assert result.token_ids[-1] == END


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


def test_grammar(adapter):
    rules = 'root ::= "(" root ")" | "ab"'
    for result in write(adapter, {"grammar": rules}, seeds=range(6)):
        if result.last.finish_reason == "stop":
            depth = (len(result.text) - 2) // 2
            assert result.text == "(" * depth + "ab" + ")" * depth


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
    assert "none to choose" in result.last.error.message


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


def test_beams_have_no_form(adapter):
    drive, _ = driver(adapter)
    sampling = SamplingParams(beam_width=2, structured_outputs=StructuredOutput(choice=["ab"]))
    with pytest.raises(InvalidRequest, match="beam_width"):
        drive.add(stage_request("it", sampling=sampling, to_client=TEXT), PROMPT)


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


# --- compiling -------------------------------------------------------------------------------------------------------


class Slow:
    """Compiles when it is told to."""

    def __init__(self, adapter) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.count = 0
        self._real = module._Compiler(adapter.vocabulary, adapter.vocab_size, [END])

    def __call__(self, kind: str, source: str) -> Any:
        self.count += 1
        self.begun.set()
        assert self.go.wait(20)
        return self._real(kind, source)


def slow(adapter, wake, **limits) -> tuple[Slow, Grammars]:
    compile = Slow(adapter)
    return compile, Grammars(adapter.vocabulary, adapter.vocab_size, {END}, wake=wake, compile=compile, **limits)


ASKING = SamplingParams(max_tokens=30, structured_outputs=StructuredOutput(choice=["ab"]))


def test_a_slow_grammar_holds_up_nobody(adapter):
    there = threading.Event()
    compile, grammars = slow(adapter, there.set)
    drive, _ = driver(adapter, grammars)
    drive.add(stage_request("slow", sampling=ASKING, to_client=TEXT), PROMPT)
    assert compile.begun.wait(20)
    assert not drive.engine.has_work()
    for index in range(3):
        drive.add(stage_request(f"other{index}", sampling=SamplingParams(max_tokens=12, ignore_eos=True)), PROMPT)
    results = drive.run()
    assert all(results[f"other{index}"].last.finished for index in range(3))
    assert "slow" not in results
    assert drive.engine.stats()["waiting"] == 1
    assert not there.is_set()
    compile.go.set()
    assert there.wait(20)
    assert drive.engine.has_work()
    assert drive.run()["slow"].text == "ab"


def test_equal_grammars_are_compiled_once(adapter):
    there = threading.Event()
    compile, grammars = slow(adapter, there.set)
    drive, _ = driver(adapter, grammars)
    compile.go.set()
    for index in range(3):
        drive.add(stage_request(f"r{index}", sampling=ASKING, to_client=TEXT), PROMPT)
    finish(drive, there, ["r0", "r1", "r2"])
    drive.add(stage_request("later", sampling=ASKING, to_client=TEXT), PROMPT)
    assert drive.run()["later"].text == "ab"
    assert compile.count == 1


def test_what_is_kept_is_bounded(adapter):
    """What was used last is there; what was used first is compiled again."""
    there = threading.Event()
    compile, grammars = slow(adapter, there.set, kept_bytes=1 << 14)
    compile.go.set()
    drive, _ = driver(adapter, grammars)

    def ask(index: int) -> int:
        """How many were compiled for it."""
        before, name = compile.count, f"r{next(numbers)}"
        form = StructuredOutput(choice=[f"a{index}", "b" * 40])
        drive.add(stage_request(name, sampling=SamplingParams(structured_outputs=form, max_tokens=60)), PROMPT)
        finish(drive, there, [name])
        return compile.count - before

    numbers = count()
    assert [ask(index) for index in range(30)] == [1] * 30
    assert (ask(29), ask(0)) == (0, 1)


def test_what_a_compiler_raises_is_the_cause(adapter):
    """What is no fault of the source fails the request, and is not lost."""
    there, broken = threading.Event(), RuntimeError("out of order")

    def compile(kind: str, source: str) -> Any:
        raise broken

    grammars = Grammars(adapter.vocabulary, adapter.vocab_size, {END}, wake=there.set, compile=compile)
    drive, _ = driver(adapter, grammars)
    drive.add(stage_request("it", sampling=ASKING, to_client=TEXT), PROMPT)
    finish(drive, there, ["it"])
    error = drive.results["it"].last.error
    assert isinstance(error, StageFailed)
    assert "could not be compiled: RuntimeError: out of order" in error.message
    assert error.__cause__ is not None
    assert error.__cause__.__cause__ is broken


def test_cancelled_while_it_compiles(adapter):
    there = threading.Event()
    compile, grammars = slow(adapter, there.set)
    drive, _ = driver(adapter, grammars)
    drive.add(stage_request("it", sampling=ASKING, to_client=TEXT), PROMPT)
    assert compile.begun.wait(20)
    drive.engine.cancel("it")
    compile.go.set()
    assert there.wait(20)
    assert not drive.engine.has_work()
    drive.engine.audit()


def test_too_slow_a_grammar_fails_its_request(adapter):
    there = threading.Event()
    compile, grammars = slow(adapter, there.set, most_seconds=0.01)
    drive, _ = driver(adapter, grammars)
    drive.add(stage_request("it", sampling=ASKING, to_client=TEXT), PROMPT)
    finish(drive, there, ["it"])
    error = drive.results["it"].last.error
    assert isinstance(error, InvalidRequest)
    assert "more than 0.01 seconds" in error.message
    compile.go.set()


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"regex": "(a"}, "parenthesis"),
        ({"grammar": 'root ::= "a'}, "string literal"),
        ({"grammar": 'other ::= "a"'}, "root"),
        ({"grammar": "root ::= root"}, "matches no text"),
        ({"json": {"type": "nope"}}, "nope"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": "[1] "}, "got [1]"),
        ({"choice": ["\u6d77", "\n"]}, "matches no text"),
    ],
)
def test_a_wrong_form_is_named(adapter, form, word):
    [result] = write(adapter, form, seeds=[1])
    error = result.last.error
    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.main.structured_outputs"
    assert word in error.message
    assert error.message.startswith("sampling.main.structured_outputs ")
    assert ".cc" not in error.message  # where in its own source xgrammar noticed is nothing to a client


@pytest.mark.parametrize(
    ("form", "field", "word"),
    [
        ({"json": "{"}, ".json", "no JSON"),
        ({"json": {"properties": {"a": {"items": {"not": {}}}}}}, ".json", "properties.a.items.not (not supported)"),
        ({"regex": "a" * (1 << 19)}, "", "at most 262144"),
        ({"choice": ["\ud800"]}, "", "surrogate"),
    ],
)
def test_what_is_seen_at_once(adapter, form, field, word):
    drive, _ = driver(adapter)
    sampling = SamplingParams(structured_outputs=StructuredOutput(**form))
    with pytest.raises(InvalidRequest) as caught:
        drive.add(stage_request("it", sampling=sampling, to_client=TEXT), PROMPT)
    assert caught.value.field == f"sampling.main.structured_outputs{field}"
    assert word in caught.value.message
    drive.engine.audit()


def test_needs_a_tokenizer(adapter):
    bare = WordAdapter(adapter.model)
    bare.vocabulary = None
    drive, _ = driver(bare)
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        drive.add(stage_request("it", sampling=ASKING), PROMPT)


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "object", "properties": {"not": {"type": "string"}}}, None),
        ({"enum": [{"not": 1}], "description": "if"}, None),
        ({"anyOf": [{"type": "string"}, {"uniqueItems": True}]}, "anyOf[1].uniqueItems (not supported)"),
        ({"allOf": [{"minimum": 1}]}, None),
        ({"allOf": [{}, {}]}, "allOf (of more than one schema is not supported; merge them)"),
        ({"$defs": {"a": {"if": {}}}}, "$defs.a.if (not supported)"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "title": "x"}, None),
        ({"$ref": "https://example.org/a"}, "$ref (to another document is not supported; give it under $defs)"),
        ({"$ref": "#/$defs/a", "minimum": 3}, "$ref (not together with minimum)"),
        ({"pattern": "a", "maxLength": 3}, "pattern (not together with minLength or maxLength)"),
        (True, None),
    ],
)
def test_what_a_schema_may_say(schema, found):
    assert unsupported(schema) == found


# --- the place in a grammar ------------------------------------------------------------------------------------------


def allowed(grammar) -> set[int]:
    bitmask = blank_mask(2, 110)
    grammar.mask(bitmask, 1)
    assert bool((bitmask[0] == -1).all())
    bits = bitmask[1].to(torch.int64)
    return {token for token in range(110) if int(bits[token // 32] >> (token % 32)) & 1}


@pytest.fixture(scope="module")
def start(adapter):
    grammars = Grammars.of(adapter)
    request = stage_request(
        "it",
        sampling=SamplingParams(structured_outputs=StructuredOutput(regex="([a-c]+|true)( [a-c]+)*")),
        to_client=TEXT,
    )
    there = threading.Event()
    grammars._wake = there.set
    compilation = grammars.ask(request)
    assert there.wait(20)
    return lambda: grammars.grammar(compilation, ())


@settings(max_examples=40, deadline=None)
@given(picks=st.lists(st.integers(0, 1000), max_size=12), back=st.integers(0, 12), data=st.data())
def test_going_back_and_forking(start, picks, back, data):
    """After any way there and back, a place allows what it allowed; forks go their own way."""
    grammar, seen, gone = start(), [], []
    for number in picks:
        seen.append(allowed(grammar))
        choices = sorted(seen[-1] - {END})
        gone.append(choices[number % len(choices)])
        assert grammar.accept(gone[-1])
    back = min(back, len(gone))
    here, fork = allowed(grammar), grammar.fork()
    fork.rollback(back)
    assert allowed(grammar) == here
    assert allowed(fork) == (seen[len(gone) - back] if back else here)
    for token in gone[len(gone) - back :]:
        assert fork.accept(token)
    assert allowed(fork) == here
    wrong = data.draw(st.sampled_from(sorted(set(range(110)) - here)))
    assert not fork.accept(wrong)
    assert allowed(fork) == here


def test_the_end_comes_only_where_the_text_may_be_over(start):
    grammar = start()
    assert END not in allowed(grammar)
    assert grammar.accept(WORDS.index("a"))
    assert END in allowed(grammar)
    assert grammar.accept(WORDS.index(" "))
    assert END not in allowed(grammar)
    assert not grammar.accept(END)
    assert grammar.accept(WORDS.index("b"))
    assert grammar.accept(END)
    assert grammar.over
    grammar.rollback(1)
    assert not grammar.over
