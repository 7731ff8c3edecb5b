"""Parse reasoning before the answer: `<think>…</think>`, with the opening marker in the reply or already in the
prompt."""

from __future__ import annotations

from dataclasses import dataclass

from segue.models.shared.dialects.pieces import Machine, ReplyPiece, Said, Speech, Thought


@dataclass(frozen=True)
class ReasoningMarks:
    open: str
    close: str


THINK = ReasoningMarks("<think>", "</think>")
MAGISTRAL = ReasoningMarks("[THINK]", "[/THINK]")
KNOWN = (THINK, MAGISTRAL)


class ReasoningParser(Machine):
    """A thought can only begin a reply; white space around it belongs to the markers."""

    def __init__(self, marks: ReasoningMarks, *, opened: bool) -> None:
        """`opened`: the prompt ends inside a thought."""
        super().__init__()
        self._marks = marks
        self._opened = opened
        self._thought = Speech(stripped=True)
        self.state = self._beginning

    def _beginning(self) -> bool:
        """After white space: the opening marker, which some models repeat although the prompt has it."""
        shown = self.buffer.lstrip()
        if not self.ended and self._marks.open.startswith(shown):
            return False
        if shown.startswith(self._marks.open):
            self.buffer = shown[len(self._marks.open) :]
            self.state = self._inside
        else:
            self.state = self._inside if self._opened else self._all
        return True

    def _inside(self) -> bool:
        text, found = self.take_until(self._marks.close)
        self.out += _thoughts(self._thought.say(text))
        if found:
            self._thought.interrupt()
            self.state = self._behind
        elif self.ended:
            self._thought.interrupt()
        return found

    def _behind(self) -> bool:
        """The answer, without the white space that separates it from the thought."""
        kept = self.buffer.lstrip()
        if kept:
            self.buffer = kept
            self.state = self._all
            return True
        self.buffer = ""
        return False

    def _all(self) -> bool:
        if self.buffer:
            self.out.append(Said(self.take(len(self.buffer))))
        return False


def _thoughts(pieces: list[ReplyPiece]) -> list[ReplyPiece]:
    return [Thought(piece.text) for piece in pieces if isinstance(piece, Said)]
