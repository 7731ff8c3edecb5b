"""A text that arrives in pieces, split into sentences."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.server.openai.audio.sentences import LONGEST, Sentences

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
