"""A bound on how long a reply may think: `thinking_token_budget`, as vLLM has it; and whether it thinks before it takes
the form that it must have."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.contract import StageRequest
from segue.messages.errors import InvalidRequest

UNBOUNDED = -1
"""`thinking_token_budget`: as many as it likes."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The ids that open a thought and close it, as the tokenizer writes the marks, and the bound."""

    open: tuple[int, ...]
    close: tuple[int, ...]
    most: int
    once: bool = False
    """The reply has one thought at most, at its very beginning: what comes behind it is held to a form."""
    may_open: bool = False
    """Of such a reply: it may begin one where the prompt leaves none open."""


class Thinking:
    """Where a reply is in its thoughts: a function of its prompt and its tokens alone.

    Tokens count between the opening mark and the closing one, in all thoughts of the reply together, and those behind
    an opening mark that the prompt leaves open among them. When there are `most`, the closing mark is forced.
    """

    def __init__(self, marks: Marks, prompt: Sequence[int]) -> None:
        self._marks = marks
        self._inside = False
        self._count = 0
        self._tail: tuple[int, ...] = ()
        """The last tokens since the last mark."""
        self.over = False
        """No thought comes any more."""
        opened, closed = _behind_last(prompt, marks.open), _behind_last(prompt, marks.close)
        if opened > closed:
            self._inside = True
            for token in prompt[opened:]:
                self.saw(token)
        elif marks.once:
            self.over = not marks.may_open

    def copy(self) -> Thinking:
        """The same place, to go on from apart."""
        return copy(self)

    def saw(self, token: int) -> None:
        """One more output token."""
        if self.over:
            return
        marks = self._marks
        if marks.once and not self._inside and token != marks.open[len(self._tail)]:
            self.over = True
            return
        mark = marks.close if self._inside else marks.open
        self._tail = (*self._tail, token)[-len(mark) :]
        self._count += self._inside
        if self._tail == mark:
            if self._inside:
                self._count -= len(mark)
            self.over = marks.once and self._inside
            self._inside, self._tail = not self._inside, ()

    def after(self, tokens: Iterable[int]) -> Thinking:
        """A copy that has seen these output tokens too."""
        other = self.copy()
        for token in tokens:
            other.saw(token)
        return other

    @property
    def opens(self) -> int | None:
        """Of a reply that is to have a form: the token that begins a thought in its place, now; None: none does."""
        return None if self.over or self._inside or self._tail else self._marks.open[0]

    @property
    def forced(self) -> int | None:
        """The only token that may come now; None: any may."""
        if self.over:
            return None
        if not self._inside:
            return self._marks.open[len(self._tail)] if self._marks.once and self._tail else None
        close = self._marks.close
        begun = next(n for n in range(len(close) - 1, -1, -1) if self._tail[len(self._tail) - n :] == close[:n])
        return close[begun] if self._count - begun >= self._marks.most else None


def marks_of(request: StageRequest, vocabulary: Vocabulary | None, vocab_size: int) -> Marks | None:
    """None where the request bounds nothing, and is held to no form that could come behind a thought. Raises
    `InvalidRequest` where the marks must be known by their ids, and cannot."""
    most = request.sampling.thinking_token_budget
    held = request.sampling.structured_outputs is not None
    bounded = most is not None and most != UNBOUNDED
    if not (bounded or held):
        return None
    field = f"sampling.{request.stage}.thinking_token_budget"
    written = request.request.thought_marks
    if written is None or vocabulary is None:
        if not bounded:
            return None
        raise InvalidRequest(
            f"{field} is {most}, but this model marks no thoughts, as far as its chat template shows: leave it out",
            field=field,
        )
    opening, closing = (tuple(vocabulary.encode(mark)) for mark in written)
    if not opening or not closing or max(*opening, *closing) >= vocab_size:
        if not bounded:
            return None
        raise InvalidRequest(
            f"{field} is {most}, but the tokenizer does not write {written[0]} and {written[1]}: leave it out",
            field=field,
        )
    bound = most if bounded and most is not None else sys.maxsize
    return Marks(opening, closing, bound, once=held, may_open=held and most is not None and bound > 0)


def _behind_last(ids: Sequence[int], mark: tuple[int, ...]) -> int:
    """The place behind the last `mark` among `ids`; -1 where there is none."""
    for end in range(len(ids), len(mark) - 1, -1):
        if ids[end - 1] == mark[-1] and tuple(ids[end - len(mark) : end]) == mark:
            return end
    return -1
