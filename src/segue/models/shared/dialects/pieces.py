"""The pieces of a reply (text, reasoning, calls), and the machinery of parsers that find them in a stream of text.

A parser receives the text as it is generated, split anywhere. Its concatenated output does not depend on the splits: it
emits only what no continuation can change, and holds back the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model begins a tool call; `index` counts the calls of a reply from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of a call's arguments: JSON as the model wrote it."""

    index: int
    text: str


ReplyPiece = Said | Thought | CallBegun | CallArguments


class Parser(Protocol):
    """Finds the pieces in one reply's text."""

    def feed(self, text: str) -> list[ReplyPiece]:
        """Add text → the pieces that are now certain."""

    def finish(self) -> list[ReplyPiece]:
        """End of the text → all pieces that were held back."""


class Machine:
    """A parser that moves from state to state over a buffer. A state is a method: it consumes the part of the buffer
    that it can decide on, and returns False if it needs more text. Once `ended`, it must consume the whole buffer.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.out: list[ReplyPiece] = []
        self.state: Callable[[], bool]

    def feed(self, text: str) -> list[ReplyPiece]:
        self.buffer += text
        return self._run()

    def finish(self) -> list[ReplyPiece]:
        self.ended = True
        return self._run()

    def _run(self) -> list[ReplyPiece]:
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
        """Whether the buffer begins with `marker`; None if this needs more text."""
        if self.buffer.startswith(marker):
            return True
        return None if marker.startswith(self.buffer) and not self.ended else False

    def take_until(self, marker: str) -> tuple[str, bool]:
        """(text before `marker`, or that cannot be part of it; whether the marker came); both are consumed."""
        at = self.buffer.find(marker)
        if at >= 0:
            text = self.take(at)
            self.take(len(marker))
            return text, True
        held = 0 if self.ended else _overlap(self.buffer, marker)
        return self.take(len(self.buffer) - held), False


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `marker`."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0)


class Speech:
    """Text around calls. Trailing white space is held back: next to a call it belongs to the format, not to the
    reply."""

    def __init__(self, *, stripped: bool = False) -> None:
        """`stripped`: leading white space is dropped too."""
        self._held = ""
        self._begun = not stripped
        self._said = False
        self._behind_call = False

    def say(self, text: str) -> list[ReplyPiece]:
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

    def finish(self) -> list[ReplyPiece]:
        held, self._held = self._held, ""
        return [Said(held)] if held and self._begun and not self._behind_call else []


class Chain:
    """Two parsers in sequence: the second parses the text that the first emits."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[ReplyPiece]:
        return self._through(self._first.feed(text))

    def finish(self) -> list[ReplyPiece]:
        return [*self._through(self._first.finish()), *self._second.finish()]

    def _through(self, pieces: Sequence[ReplyPiece]) -> list[ReplyPiece]:
        return [
            new for piece in pieces for new in (self._second.feed(piece.text) if isinstance(piece, Said) else [piece])
        ]


class Plain:
    """Emits everything as text."""

    def feed(self, text: str) -> list[ReplyPiece]:
        return [Said(text)] if text else []

    def finish(self) -> list[ReplyPiece]:
        return []
