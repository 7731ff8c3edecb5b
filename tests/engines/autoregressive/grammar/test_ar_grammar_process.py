"""Grammars that are compiled in processes of their own: they end at their time limit, and nobody waits for them."""

from __future__ import annotations

import os
import re
import select
import signal
import threading

import pytest
from ar_adapter import prompts, stage_request
from ar_words import END, PROMPT, TEXT, WORDS, Words, driver, finish, word_adapter
from grammar_home import children, home

from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.grammar.xgrammar_compiler import XGrammar
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams, StructuredOutput

ENDLESS = "(" + "|".join(f"[ab]{{{count}}}" for count in range(1, 2500)) + ")*"
"""24 KB; compiled for more than 20 s of a processor that does nothing else, for a vocabulary of 100 tokens."""
MEMORY = 64 << 30
"""More than it takes until it is ended; a fast processor fills 1 GiB within a second."""


@pytest.fixture(scope="module")
def kept():
    with home(memory=MEMORY) as (compilers, [process]):
        yield compilers, process


def compiler(compilers, seconds: float):
    return compilers.compiler(XGrammar(Words().token_bytes(range(110)), [END]), seconds)


def asked(expression: str, most: int = 40) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=most, structured_outputs=StructuredOutput(regex=expression))


def ended(pids: list[int]) -> bool:
    """All of them end, without our help."""
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            continue
        if not poll.poll(240_000):
            return False
        poll = select.poll()
    return True


def test_what_takes_too_long_is_ended():
    with home(memory=MEMORY) as (compilers, [process]):
        with pytest.raises(InvalidRequest, match="takes more than 1 seconds to compile"):
            compiler(compilers, 1.0)("regex", ENDLESS)
        assert ended(children(process))


def test_what_takes_too_much_memory_is_refused():
    """An expression of a few bytes that the compiler makes into millions of states."""
    with home(memory=32 << 20) as (compilers, _):
        with pytest.raises(InvalidRequest, match=r"takes more than 33554432 bytes .*limits\.max_grammar_bytes"):
            compiler(compilers, 60.0)("regex", "(((a|b){0,200}){0,200}c){0,200}")
        assert compiler(compilers, 60.0)("regex", "[ab]{2,4}")


def test_others_do_not_wait_for_it(kept):
    """More endless ones than this process would compile at once; a quick one passes them, and gives what it should."""
    compilers, process = kept
    there = threading.Event()
    words, adapter = Words(), word_adapter()
    grammars = Grammars(words, adapter.vocab_size, {END}, wake=there.set, home=compilers)
    drive, _ = driver(adapter, grammars)
    endless = [f"endless{index}" for index in range(3)]
    for index, name in enumerate(endless):
        drive.add(stage_request(name, sampling=asked(ENDLESS + "c" * index), to_client=TEXT), PROMPT)
    drive.add(stage_request("quick", sampling=asked("(yes|no) [0-9]{2,4}!"), to_client=TEXT, seed=3), PROMPT)
    drive.add(stage_request("plain", sampling=SamplingParams(max_tokens=5, ignore_eos=True)), prompts(1, [4])[0])
    finish(drive, there, ["quick", "plain"])
    assert re.fullmatch("(yes|no) [0-9]{2,4}!", drive.results["quick"].text)
    assert not any(name in drive.results for name in endless)
    while len(left := children(process)) < len(endless):
        pass  # each is forked when its thread has come to ask for it
    for pid in left:
        os.kill(pid, signal.SIGKILL)  # as the system does when memory is short
    finish(drive, there, endless)
    for name in endless:
        error = drive.results[name].last.error
        assert isinstance(error, StageFailed)
        assert "the compiler has crashed" in error.message
    drive.add(stage_request("after", sampling=asked("[a-f]{8}"), to_client=TEXT), PROMPT)
    finish(drive, there, ["after"])
    assert re.fullmatch("[a-f]{8}", drive.results["after"].text)


@pytest.mark.parametrize(
    ("kind", "source", "word"),
    [("regex", "(a", "cannot be compiled"), ("grammar", "root ::= root", "matches no text")],
)
def test_what_is_wrong_is_told_as_it_is_here(kept, kind, source, word):
    compilers, _ = kept
    with pytest.raises(InvalidRequest, match=word) as apart:
        compiler(compilers, 60.0)(kind, source)
    with pytest.raises(InvalidRequest) as here:
        XGrammar(Words().token_bytes(range(110)), [END])(kind, source)
    assert apart.value.message == here.value.message


def test_a_vocabulary_each(kept):
    """Two compilers of one home do not mix up their words."""
    compilers, _ = kept
    first = compiler(compilers, 60.0)
    backwards = [*Words().token_bytes([END]), *reversed(Words().token_bytes(range(1, len(WORDS))))]
    second = compilers.compiler(XGrammar(backwards, [END]), 60.0)
    from xgrammar import GrammarMatcher

    for compile, words in ((first, Words().token_bytes(range(len(WORDS)))), (second, backwards)):
        matcher = GrammarMatcher(compile("regex", "z"))
        assert matcher.accept_token(words.index(b"z"))
        assert not GrammarMatcher(compile("regex", "z")).accept_token(words.index(b"y"))


@pytest.mark.nightly
def test_what_ends_its_home_is_compiled_again_but_once():
    with home(deadly=3) as (compilers, processes):
        compile = compiler(compilers, 60.0)
        with pytest.raises(StageFailed, match=r"ended twice while compiling the regex '\[a-f\]\{8\}'"):
            compile("regex", "[a-f]{8}")
        assert len(processes) == 2
        assert compile("regex", "[0-9]{4}").memory_size_bytes
        assert len(processes) == 4, "the third ended, too, and others go on"


def test_words_of_a_vocabulary_can_be_sent_whatever_their_length() -> None:
    """The library gives long ones as a class of its own."""
    words = [b"a" * length for length in range(1, 30)]
    given = XGrammar(words, [0]).words
    assert given == words
    assert {type(word) for word in given} == {bytes}
