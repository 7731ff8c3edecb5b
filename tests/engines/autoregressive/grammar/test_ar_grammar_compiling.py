"""Compiling a grammar holds up nobody else, is done once, and is bounded."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import pytest
from ar_adapter import stage_request
from ar_words import ASKING, END, PROMPT, TEXT, driver, finish, word_adapter

from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.grammar.xgrammar_compiler import XGrammar
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams, StructuredOutput


@pytest.fixture(scope="module")
def adapter():
    return word_adapter()


class Slow:
    """Compiles when it is told to."""

    def __init__(self, adapter) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.count = 0
        self._real = XGrammar(adapter.vocabulary.token_bytes(range(adapter.vocab_size)), [END])

    def __call__(self, kind: str, source: str) -> Any:
        self.count += 1
        self.begun.set()
        assert self.go.wait(120)
        return self._real(kind, source)


def slow(adapter, wake, **limits) -> tuple[Slow, Grammars]:
    compile = Slow(adapter)
    return compile, Grammars(adapter.vocabulary, adapter.vocab_size, {END}, wake=wake, compile=compile, **limits)


def test_a_slow_grammar_holds_up_nobody(adapter):
    there = threading.Event()
    compile, grammars = slow(adapter, there.set)
    drive, _ = driver(adapter, grammars)
    drive.add(stage_request("slow", sampling=ASKING, to_client=TEXT), PROMPT)
    assert compile.begun.wait(120)
    assert not drive.engine.has_work()
    for index in range(3):
        drive.add(stage_request(f"other{index}", sampling=SamplingParams(max_tokens=12, ignore_eos=True)), PROMPT)
    results = drive.run()
    assert all(results[f"other{index}"].last.finished for index in range(3))
    assert "slow" not in results
    assert drive.engine.stats()["waiting"] == 1
    assert not there.is_set()
    compile.go.set()
    assert there.wait(120)
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
    assert compile.begun.wait(120)
    drive.engine.cancel("it")
    compile.go.set()
    assert there.wait(120)
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
