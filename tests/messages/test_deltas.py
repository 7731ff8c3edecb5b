"""What a client has already: whatever a second attempt of a stage makes again, its client gets each unit once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.messages.deltas import (
    AudioDelta,
    ClassesDelta,
    ClientDelta,
    EmbeddingDelta,
    EncodedDelta,
    ImageDelta,
    ProgressDelta,
    ScoreDelta,
    TextDelta,
    TokenLogprobs,
    TokensDelta,
    TopToken,
    VideoDelta,
    after,
    stream_of,
)

UNITS = 12
LETTERS = "abcdefghijkl"
LOGPROBS = [TokenLogprobs(TopToken(number, -1.0, 1, "", b"")) for number in range(UNITS)]

Make = Callable[[int, int], ClientDelta]
"""(start, end) → a delta of these units of an output of `UNITS`."""
CUT: dict[str, Make] = {
    "audio": lambda a, b: AudioDelta("s", b"".join(bytes([n] * 4) for n in range(a, b)), 8000, start=a),
    "video": lambda a, b: VideoDelta("s", b"".join(bytes([n] * 6) for n in range(a, b)), b - a, 1, 2, 8.0, 0, a),
    "encoded": lambda a, b: EncodedDelta("s", "audio", 0, a, "audio/wav", bytes(range(a, b))),
}
WHOLE: dict[str, Make] = {
    "embedding": lambda a, b: EmbeddingDelta("s", bytes([a] * 4), start=a),
    "score": lambda a, b: ScoreDelta("s", float(a), start=a),
    "classes": lambda a, b: ClassesDelta("s", bytes([a] * 4), "x", start=a),
    "tokens": lambda a, b: TokensDelta("s", [a], [], "", start=a),
    "preview": lambda a, b: ImageDelta("s", bytes([a] * 3), 1, 1, 0, a if a < UNITS - 1 else None),
    "progress": lambda a, b: ProgressDelta("s", b, UNITS),
}


def content(deltas: list[ClientDelta]) -> object:
    match deltas[0]:
        case AudioDelta():
            return b"".join(delta.samples for delta in deltas if isinstance(delta, AudioDelta))
        case VideoDelta():
            return b"".join(delta.array.tobytes() for delta in deltas if isinstance(delta, VideoDelta))
        case EncodedDelta():
            return b"".join(delta.data for delta in deltas if isinstance(delta, EncodedDelta))
    return deltas


def pieces(draw: st.DrawFn, upto: int) -> list[tuple[int, int]]:
    cuts = sorted({0, upto, *draw(st.lists(st.integers(0, upto)))})
    return list(pairwise(cuts))


def received(attempts: list[list[ClientDelta]]) -> list[ClientDelta]:
    have, got = 0, []
    for delta in [delta for attempt in attempts for delta in attempt]:
        new = after(delta, have)
        have = max(have, delta.end)
        if new is not None:
            assert new.end == delta.end
            assert stream_of(new) == stream_of(delta)
            got.append(new)
    return got


@pytest.mark.parametrize("kind", CUT)
@given(data=st.data())
def test_units_that_are_made_again_come_once(kind: str, data: st.DataObject) -> None:
    """The first attempt ends anywhere, the second splits its output in another way."""
    first, second = (
        [CUT[kind](*piece) for piece in data.draw(st.composite(pieces)(upto))]
        for upto in (data.draw(st.integers(0, UNITS)), UNITS)
    )
    got = received([first, second])
    assert content(got) == content([CUT[kind](0, UNITS)])
    assert [delta.start for delta in got[1:]] == [delta.end for delta in got[:-1]]


@pytest.mark.parametrize("kind", WHOLE)
@given(upto=st.integers(0, UNITS))
def test_what_is_one_unit_comes_once(kind: str, upto: int) -> None:
    every = [WHOLE[kind](number, number + 1) for number in range(UNITS)]
    assert received([every[:upto], every]) == every
    assert received([every[-1:], every]) == every[-1:]


@given(data=st.data())
def test_text_and_ids_come_once(data: st.DataObject) -> None:
    """Text is held back by up to two characters; the second attempt has no log-probabilities for ids of the first."""

    def deltas(upto: int, without: int) -> list[TextDelta]:
        made, had = [], 0
        for a, b in data.draw(st.composite(pieces)(upto)):
            text = LETTERS[had : max(had, b - 2) if b < UNITS else UNITS]
            prompt = [7, 8] if a == 0 else []
            ids, logprobs = list(range(a, b)), LOGPROBS[max(a, without) : b]
            made.append(TextDelta("s", text, ids, a, logprobs=logprobs, prompt_token_ids=prompt, start=had))
            had += len(text)
        return made

    first = deltas(upto := data.draw(st.integers(0, UNITS)), 0)
    have, ids = sum(len(delta.text) for delta in first), upto
    got = first + [new for delta in deltas(UNITS, upto) if isinstance(new := after(delta, have, ids), TextDelta)]
    assert "".join(delta.text for delta in got) == LETTERS
    assert [one for delta in got for one in delta.token_ids] == list(range(UNITS))
    assert [one for delta in got for one in delta.logprobs] == LOGPROBS
    assert [one for delta in got for one in delta.prompt_token_ids] == [7, 8]
    assert all(delta.text or delta.token_ids for delta in got)
    assert [delta.start for delta in got[1:]] == [delta.end for delta in got[:-1]]
