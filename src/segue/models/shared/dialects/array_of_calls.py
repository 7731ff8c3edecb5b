"""Calls as a JSON array: one of Mistral's formats, and the format of replies that a grammar forces to call tools."""

from __future__ import annotations

from segue.models.shared.dialects.objects import ObjectMachine
from segue.models.shared.dialects.pieces import ReplyPiece, Said


class ArrayOfCalls(ObjectMachine):
    """Parses `[{"name": …, "arguments": {…}}, …]`; anything else is text."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._beginning

    def _beginning(self) -> bool:
        self.skip_space()
        if not self.buffer and not self.ended:
            return False
        if self.buffer.startswith("["):
            self.array("")
        else:
            self.state = self.behind
        return True

    def array(self, marker: str) -> None:
        """Start at a buffer that begins with `[`, after `marker`."""
        self._next(marker + self.take(1))

    def _next(self, marker: str) -> None:
        self.expect(marker, then=self._between, otherwise=self.behind)

    def _between(self) -> bool:
        self.skip_space()
        if not self.buffer and not self.ended:
            return False
        if self.buffer.startswith(","):
            self._next(self.take(1))
            return True
        if self.buffer.startswith("]"):
            self.take(1)
        self.state = self.behind
        return True

    def behind(self) -> bool:
        """After the last call: the rest is text."""
        self.out += self.speech.say(self.take(len(self.buffer)))
        if self.ended:
            self.out += self.speech.finish()
        return False


class HeldCalls:
    """A reply that a grammar restricts to an array of calls. A call that breaks off before its function's name is
    dropped; it is not text either."""

    def __init__(self) -> None:
        self._calls = ArrayOfCalls()

    def feed(self, text: str) -> list[ReplyPiece]:
        return [piece for piece in self._calls.feed(text) if not isinstance(piece, Said)]

    def finish(self) -> list[ReplyPiece]:
        return [piece for piece in self._calls.finish() if not isinstance(piece, Said)]
