"""Where the media of a prompt of token ids stand: found from one placeholder each, or from what the processor puts
there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.messages.errors import InvalidRequest
from segue.models.shared.text.placeholders import expanded, one_each

ROWS = {"image": 90, "audio": 91}
OTHER = st.lists(st.integers(0, 9), min_size=1, max_size=3)
"""Ids between media."""


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[str, list[int], list[int]]]:
    """Media in order: kind, its expansion, and the ids after it. An expansion may begin and end with other ids."""
    media = []
    for kind in draw(st.lists(st.sampled_from(("image", "audio")), max_size=4)):
        edge = draw(st.lists(st.integers(20, 29), max_size=2))
        media.append((kind, [*edge, *[ROWS[kind]] * draw(st.integers(1, 4)), *edge], draw(OTHER)))
    return media


@given(begin=OTHER, media=prompts())
def test_every_medium_is_found_in_order(begin: list[int], media: list[tuple[str, list[int], list[int]]]) -> None:
    kinds = [kind for kind, _, _ in media]
    expansions = {kind: [own for of, own, _ in media if of == kind] for kind in ROWS}
    short, long = list(begin), list(begin)
    for kind, own, after in media:
        short += [ROWS[kind], *after]
        long += [*own, *after]
    counts = {kind: len(own) for kind, own in expansions.items()}
    single = one_each(short, ROWS, counts)
    assert single is not None
    assert [place.kind for place in single] == kinds
    assert all(short[place.start : place.stop] == [ROWS[place.kind]] for place in single)
    found = expanded(long, ROWS, expansions, "prompt")
    assert [(place.kind, place.index) for place in found] == [(place.kind, place.index) for place in single]
    assert [long[place.start : place.stop] for place in found] == [own for _, own, _ in media]
    if media:
        for wrong in ([*long, ROWS[kinds[0]]], [token for token in long if token != ROWS[kinds[0]]]):
            with pytest.raises(InvalidRequest, match=r"prompt has \d+ placeholders? for"):
                expanded(wrong, ROWS, expansions, "prompt")


def test_equal_placeholders_side_by_side_are_as_many_media() -> None:
    places = one_each([1, 90, 90, 2], ROWS, {"image": 2})
    assert places is not None
    assert [(place.start, place.stop) for place in places] == [(1, 2), (2, 3)]


def test_an_error_names_placeholders_media_and_lengths() -> None:
    with pytest.raises(InvalidRequest) as caught:
        expanded([1, 90, 90, 90, 2], ROWS, {"image": [[90] * 4, [90] * 2]}, "prompt_token_ids")
    assert caught.value.field == "prompt_token_ids"
    assert caught.value.message == (
        "prompt_token_ids has 3 placeholders for image, but multi_modal_data has 2 image: write one for each, or "
        "exactly as many as they take, in one run each: 4, 2"
    )
