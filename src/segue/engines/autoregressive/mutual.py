"""Spans of a prompt whose tokens see each other in both directions (a picture's, in some models): a step computes all
of such a span or nothing of it.

Keys and values of its tokens depend, from the second layer on, on the whole span. So neither a chunk of a prefill nor
a hit in the prefix cache ends inside one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from segue.messages.errors import StageFailed

Mutual = Sequence[tuple[int, int]]
"""Ranges [start, stop) of tokens, in order; none touches another."""


def around(mutual: Mutual, place: int) -> tuple[int, int]:
    """The last place at or before `place`, and the first at or after it, that lie inside no span."""
    index = bisect_right(mutual, place, key=lambda span: span[0]) - 1
    if index >= 0 and mutual[index][0] < place < mutual[index][1]:
        return mutual[index]
    return place, place


def whole(mutual: Mutual, start: int, tokens: int) -> int:
    """How many tokens from `start` on, which is inside no span, are taken in place of `tokens`: no more, unless a span
    begins right there, which is then taken as a whole."""
    before, after = around(mutual, start + tokens)
    return (before if before > start else after) - start


def fitting(mutual: Mutual, start: int, tokens: int) -> int:
    """The same where no more than `tokens` have room: may be 0."""
    return around(mutual, start + tokens)[0] - start if tokens > 0 else tokens


def longest_of(mutual: Mutual) -> int:
    """Tokens of the longest span; 1 where there is none."""
    return max((stop - start for start, stop in mutual), default=1)


def check_mutual(mutual: Mutual, length: int, stage: str) -> None:
    """Raise `StageFailed` where spans of a prompt of so many tokens are not in order, overlap or are empty."""
    borders = [0, *(border for span in mutual for border in span), length]
    if any(one > other for one, other in pairwise(borders)) or any(start >= stop for start, stop in mutual):
        raise StageFailed(f"prompt of {length} tokens with the spans {list(mutual)}", stage=stage)
