"""Pieces of text add up to the whole, characters are never cut, stop strings are found wherever tokens end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from segue.engines.autoregressive.sample.detokenize import Detokenizer, StopStrings

TEXT = ["the stage graph streams", "Grüße aus Köln, 今日は世界", "🙂🙃 emoji und mehr", "new lines\n\n  and spaces"]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE with few merges: most characters beyond ASCII are several tokens."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return built


def pieces(tokenizer, ids, *, skip=True) -> list[str]:
    detokenizer = Detokenizer(lambda part: tokenizer.decode(list(part), skip_special_tokens=skip))
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.booleans())
def test_pieces_of_real_text(tokenizer, text, skip):
    ids = tokenizer.encode(text).ids
    parts = pieces(tokenizer, ids, skip=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=40), st.booleans())
def test_pieces_of_any_tokens(tokenizer, ids, skip):
    """Broken UTF-8 and special tokens included."""
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_text_comes_as_soon_as_a_character_is_whole(tokenizer):
    ids = tokenizer.encode("🦜a").ids
    parts = pieces(tokenizer, ids)
    assert parts[-2:] == ["a", ""]
    assert parts[-3] == "🦜"
    assert set(parts[:-3]) == {""}


def test_leading_space_dropped_by_the_tokenizer():
    """Metaspace decoders drop the space of the first token only."""
    words = {0: "▁one", 1: "▁two", 2: "ly"}
    decoder = decoders.Metaspace()
    detokenizer = Detokenizer(lambda part: decoder.decode([words[token] for token in part]))
    assert [detokenizer.push(token) for token in (0, 1, 2, 1)] == ["one", " two", "ly", " two"]


def search(stops, parts, *, include=False):
    finder, out = StopStrings(stops, include=include), []
    for part in parts:
        text, found = finder.push(part)
        out.append(text)
        if found:
            return "".join(out), True, out
    out.append(finder.flush())
    return "".join(out), False, out


def expected(stops, text, *, include=False):
    """What one character at a time gives: the stop string that is complete first ends the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: end if include else min(starts)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_hang_on_borders(parts, stops, include):
    text, found, _ = search(stops, parts, include=include)
    assert (text, found) == expected(stops, "".join(parts), include=include)


def test_text_is_held_back_only_while_a_stop_string_may_be_forming():
    _, _, out = search(["<end>"], ["a<e", "n", "x", "b"])
    assert out == ["a", "", "<enx", "b", ""]


def test_no_stop_before_it_is_allowed():
    finder = StopStrings(["x"], include=False)
    assert finder.push("axb", may_stop=False) == ("axb", False)
    assert finder.push("cx") == ("c", True)
