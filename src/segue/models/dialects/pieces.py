"""What a reply is made of, and the machinery of those who find it in a stream of text.

A parser sees the text as it is made, cut anywhere. What it gives, put together, does not depend on the cuts: it decides
only on what no continuation can change, and holds back the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool; `index` counts the calls of a reply from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of a call's arguments, which are JSON as the model wrote it."""

    index: int
    text: str


Piece = Said | Thought | CallBegun | CallArguments


class Parser(Protocol):
    """Finds the pieces in one reply's text."""

    def feed(self, text: str) -> list[Piece]:
        """More text → what is certain now."""

    def finish(self) -> list[Piece]:
        """There is no more text → everything that was held back."""


class Machine:
    """A parser that moves from state to state over a buffer. A state is a method: it takes what it can decide on from
    the buffer, and returns False when it can do nothing until more text comes. Once `ended`, it must use the buffer up.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.out: list[Piece] = []
        self.state: Callable[[], bool]

    def feed(self, text: str) -> list[Piece]:
        self.buffer += text
        return self._run()

    def finish(self) -> list[Piece]:
        self.ended = True
        return self._run()

    def _run(self) -> list[Piece]:
        while self.state():
            pass
        out, self.out = self.out, []
        return out

    def skip_space(self) -> None:
        self.buffer = self.buffer.lstrip()

    def take(self, count: int) -> str:
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def sees(self, marker: str) -> bool | None:
        """Whether the buffer begins with `marker`; None: more text will tell."""
        if self.buffer.startswith(marker):
            return True
        return None if marker.startswith(self.buffer) and not self.ended else False

    def take_until(self, marker: str) -> tuple[str, bool]:
        """(text that stands before `marker` or cannot belong to it, whether the marker came); both are taken."""
        at = self.buffer.find(marker)
        if at >= 0:
            text = self.take(at)
            self.take(len(marker))
            return text, True
        held = 0 if self.ended else _overlap(self.buffer, marker)
        return self.take(len(self.buffer) - held), False


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0)


class Speech:
    """Text around calls. White space at its end is held back: beside a call it is the format's, not the reply's."""

    def __init__(self, *, stripped: bool = False) -> None:
        """`stripped`: white space at the beginning is not given either."""
        self._held = ""
        self._begun = not stripped
        self._said = False
        self._behind_call = False

    def say(self, text: str) -> list[Piece]:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if not self._begun:
            kept = kept.lstrip()
        if not kept:
            return []
        self._begun = self._said = True
        self._behind_call = False
        return [Said(kept)]

    def interrupt(self) -> None:
        """A call begins here."""
        self._held = ""
        self._behind_call = True
        self._begun = self._said

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [Said(held)] if held and self._begun and not self._behind_call else []


class Chain:
    """One parser behind the other: what the first takes for said goes through the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Piece]:
        return self._through(self._first.feed(text))

    def finish(self) -> list[Piece]:
        return [*self._through(self._first.finish()), *self._second.finish()]

    def _through(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [
            new for piece in pieces for new in (self._second.feed(piece.text) if isinstance(piece, Said) else [piece])
        ]


class Plain:
    """Everything is said."""

    def feed(self, text: str) -> list[Piece]:
        return [Said(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
