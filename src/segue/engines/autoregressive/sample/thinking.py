"""Limits how long a reply may think (`thinking_token_budget`, as in vLLM), and tracks whether its structured output has
begun or it still thinks.

Optional reading: `RowRules` asks a `Thinking` whether its budget is spent, and which token must follow then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.contract import StageRequest
from segue.messages.errors import InvalidRequest

UNBOUNDED = -1
"""`thinking_token_budget`: no limit."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The token ids of the opening and closing thought marks, and the limit."""

    open: tuple[int, ...]
    close: tuple[int, ...]
    most: int
    once: bool = False
    """The reply has at most one thought, at its very start; the text after it is structured output."""
    may_open: bool = False
    """For `once`: the reply may open a thought if the prompt leaves none open."""


class Thinking:
    """The thinking state of a reply: a function of its prompt and its tokens alone.

    Tokens between opening and closing marks count, over all thoughts of the reply together, including those after an
    opening mark that the prompt leaves open. When `most` is reached, the closing mark is forced.
    """

    def __init__(self, marks: Marks, prompt: Sequence[int]) -> None:
        self._marks = marks
        self._inside = False
        self._count = 0
        self._tail: tuple[int, ...] = ()
        """The last tokens after the last mark."""
        self.over = False
        """No further thought can follow."""
        opened, closed = _behind_last(prompt, marks.open), _behind_last(prompt, marks.close)
        if opened > closed:
            self._inside = True
            for token in prompt[opened:]:
                self.saw(token)
        elif marks.once:
            self.over = not marks.may_open

    def copy(self) -> Thinking:
        """An independent copy in the same state."""
        return copy(self)

    def saw(self, token: int) -> None:
        """Record one more output token."""
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
        """A copy that has also seen these output tokens."""
        other = self.copy()
        for token in tokens:
            other.saw(token)
        return other

    @property
    def opens(self) -> int | None:
        """For structured output: the token that may open a thought now instead; None: no thought may open."""
        return None if self.over or self._inside or self._tail else self._marks.open[0]

    @property
    def forced(self) -> int | None:
        """The only token allowed next; None: any token is."""
        if self.over:
            return None
        if not self._inside:
            return self._marks.open[len(self._tail)] if self._marks.once and self._tail else None
        close = self._marks.close
        begun = next(n for n in range(len(close) - 1, -1, -1) if self._tail[len(self._tail) - n :] == close[:n])
        return close[begun] if self._count - begun >= self._marks.most else None


def marks_of(request: StageRequest, vocabulary: Vocabulary | None, vocab_size: int) -> Marks | None:
    """None if the request sets no limit, and has no structured output that could follow a thought. Raises
    `InvalidRequest` if a limit is set but the ids of the marks cannot be determined."""
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
            f"{field} is {most}, but this model's chat template marks no reasoning: leave it out",
            field=field,
        )
    opening, closing = (tuple(vocabulary.encode(mark)) for mark in written)
    if not opening or not closing or max(*opening, *closing) >= vocab_size:
        if not bounded:
            return None
        raise InvalidRequest(
            f"{field} is {most}, but the tokenizer has no tokens for {written[0]} and {written[1]}: leave it out",
            field=field,
        )
    bound = most if bounded and most is not None else sys.maxsize
    return Marks(opening, closing, bound, once=held, may_open=held and most is not None and bound > 0)


def _behind_last(ids: Sequence[int], mark: tuple[int, ...]) -> int:
    """Index after the last `mark` in `ids`; -1 if there is none."""
    for end in range(len(ids), len(mark) - 1, -1):
        if ids[end - 1] == mark[-1] and tuple(ids[end - len(mark) : end]) == mark:
            return end
    return -1
