"""The place in a grammar: what may follow, going back, and forking."""

from __future__ import annotations

import threading

import pytest
import torch
from ar_adapter import stage_request
from ar_words import END, TEXT, WORDS, word_adapter
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.grammar.xgrammar_compiler import blank_mask
from segue.messages.sampling import SamplingParams, StructuredOutput


@pytest.fixture(scope="module")
def adapter():
    return word_adapter()


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
    assert there.wait(120)
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
