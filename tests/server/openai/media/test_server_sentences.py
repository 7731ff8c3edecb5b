"""A text that arrives in pieces, split into sentences, or into pieces and passages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.orchestrator.spoken import words
from segue.orchestrator.spoken.sentences import LONGEST, Sentences
from segue.orchestrator.spoken.words import Words

LETTERS = "aZ1é你।．. ...!?。！」\"')\n ,，;-…e.g.Dr.\t"
TEXTS = st.text(st.sampled_from(LETTERS) | st.characters(), max_size=120) | st.builds(
    lambda text, times: text * times, st.text(st.sampled_from(LETTERS), min_size=1, max_size=12), st.integers(1, 120)
)


def split(*pieces: str) -> list[str]:
    sentences = Sentences()
    return [one for piece in pieces for one in sentences.feed(piece)] + sentences.finish()


@given(TEXTS, st.lists(st.integers(0, 1500)))
def test_any_pieces_give_the_same_sentences(text: str, cuts: list[int]) -> None:
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole = split(text)
    assert split(*(text[start:end] for start, end in pairwise(at))) == whole
    assert split(*text) == whole
    assert "".join(whole) == text
    assert all(0 < len(one) <= LONGEST for one in whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Pi is 3.14, see example.com. Good.", ["Pi is 3.14, see example.com.", "Good."]),
        ("Fruit, e.g. Apples, by Dr. J. Smith. Yes.", ["Fruit, e.g. Apples, by Dr. J. Smith.", "Yes."]),
        ("See No. 5. No. Never.", ["See No. 5.", "No.", "Never."]),
        ("1. Eat. 2. Sleep.", ["1. Eat.", "2. Sleep."]),
        (
            "He said “Come!” Then (he left.) Well... so it is.",
            ["He said “Come!”", "Then (he left.)", "Well... so it is."],
        ),
        ('"Really?" he asked. "Yes."', ['"Really?" he asked.', '"Yes."']),
        ("你好！今天很好。“是吗？”对。", ["你好！", "今天很好。", "“是吗？”", "对。"]),
        ("नमस्ते। कैसे हो?", ["नमस्ते।", "कैसे हो?"]),
        ("A title\n\nThe text\ngoes on.\n\n\n", ["A title", "The text\ngoes on."]),
        ("?!? ... Yes?! No.", ["?!? ... Yes?!", "No."]),
        ("", []),
    ],
)
def test_where_sentences_end(text: str, expected: list[str]) -> None:
    assert [one.strip() for one in split(text) if one.strip()] == expected


def test_a_sentence_comes_as_soon_as_its_end_is_certain() -> None:
    sentences = Sentences()
    assert sentences.feed("It is 3.") == []
    assert sentences.feed("5 metres. ") == []
    assert sentences.feed("A") == ["It is 3.5 metres."]
    assert sentences.feed(" boat\n\n") == [" A boat\n\n"]
    assert sentences.feed("It left.\n") == []
    assert sentences.feed("\n") == ["It left."]
    assert sentences.feed("是。") == []
    assert sentences.feed("不") == ["\n\n是。"]
    assert sentences.finish() == ["不"]


def test_a_sentence_without_end_is_cut_at_a_clause() -> None:
    assert split("word " * 70 + "end, " + "more " * 20)[0].endswith("end, ")
    assert split("word " * 200)[0] == ("word " * 80)[: LONGEST - 1]
    assert [len(one) for one in split("x" * 1000)] == [400, 400, 200]


# --- words -----------------------------------------------------------------------------------------------------------


def words_of(*pieces: str) -> list[str | None]:
    splitter = Words()
    return [one for piece in pieces for one in splitter.feed(piece)] + splitter.finish()


@given(TEXTS, st.lists(st.integers(0, 1500)))
def test_pieces_end_where_a_tokenizer_splits(text: str, cuts: list[int]) -> None:
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = words_of(*(text[start:end] for start, end in pairwise(at)))
    assert "".join(piece or "" for piece in pieces) == text
    for before, after in pairwise(pieces):
        if before is not None and after is not None:  # else the passage ends between them, with a sentence perhaps
            assert before[-1].isalnum()
            assert not after[0].isalnum()


def test_a_word_comes_with_the_character_after_it() -> None:
    splitter = Words()
    assert splitter.feed("Good mor") == ["Good"]
    assert splitter.feed("ning") == []
    assert splitter.feed(", all") == [" morning"]
    assert splitter.feed("你好") == []
    assert splitter.feed("。") == [", all你好"]
    assert splitter.feed("e\u0301 ") == []
    assert splitter.finish() == ["。e\u0301 "]


def test_passages_end_with_a_sentence() -> None:
    sentence = "These are words of a sentence. "
    made = words_of(*(sentence * 200))
    passages = "".join("|" if piece is None else piece for piece in made).split("|")
    assert "".join(passages) == sentence * 200
    assert len(passages) == 7
    for passage in passages[:-1]:
        assert passage.endswith("sentence.")
        assert words.PASSAGE <= len(passage) < words.PASSAGE + len(sentence) + 1
    endless = "".join("|" if piece is None else piece for piece in words_of(*("word " * 2000))).split("|")
    assert max(map(len, endless)) <= words.LONGEST
    assert len(endless) == 6
    at_once = "".join("|" if piece is None else piece for piece in words_of("word " * 900 + ". More.")).split("|")
    assert all(passage.endswith("word") for passage in [*endless[:-1], *at_once[:-1]])


def test_a_run_of_marks_takes_no_time() -> None:
    """An expression that goes back from each mark would take minutes."""
    for marks in ("." * 65536, '?"' * 32768, "\n " * 32768):
        assert "".join(piece or "" for piece in words_of(marks)) == marks
