"""Bidirectional spans: prompt tokens that attend to each other in both directions (an image's, in some models). A step
computes all of such a span or none of it.

From the second layer on, keys and values of its tokens depend on the whole span. So neither a prefill chunk nor a
prefix-cache hit ends inside one.

Optional reading: only models that attend in both directions within some spans have any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from segue.messages.errors import StageFailed

Bidirectional = Sequence[tuple[int, int]]
"""Ranges [start, stop) of tokens, in order; no two of them touch."""


def around(bidirectional: Bidirectional, place: int) -> tuple[int, int]:
    """Return the last place at or before `place`, and the first at or after it, that lie inside no span."""
    index = bisect_right(bidirectional, place, key=lambda span: span[0]) - 1
    if index >= 0 and bidirectional[index][0] < place < bidirectional[index][1]:
        return bidirectional[index]
    return place, place


def whole(bidirectional: Bidirectional, start: int, tokens: int) -> int:
    """How many tokens to take from `start` (inside no span) instead of `tokens`: no more, unless a span begins at
    `start`, which is then taken whole."""
    before, after = around(bidirectional, start + tokens)
    return (before if before > start else after) - start


def fitting(bidirectional: Bidirectional, start: int, tokens: int) -> int:
    """Like `whole`, but never more than `tokens`: may be 0."""
    return around(bidirectional, start + tokens)[0] - start if tokens > 0 else tokens


def longest_of(bidirectional: Bidirectional) -> int:
    """Tokens of the longest span; 1 if there is none."""
    return max((stop - start for start, stop in bidirectional), default=1)


def check_bidirectional(bidirectional: Bidirectional, length: int, stage: str) -> None:
    """Raise `StageFailed` if spans of a prompt of `length` tokens are out of order, overlap or are empty."""
    borders = [0, *(border for span in bidirectional for border in span), length]
    if any(one > other for one, other in pairwise(borders)) or any(start >= stop for start, stop in bidirectional):
        raise StageFailed(f"prompt of {length} tokens with the spans {list(bidirectional)}", stage=stage)
