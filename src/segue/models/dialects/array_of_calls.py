"""Calls as a JSON array: one of Mistral's forms, and what a grammar makes of a reply that must call tools."""

from __future__ import annotations

from segue.models.dialects.objects import ObjectMachine


class ArrayOfCalls(ObjectMachine):
    """`[{"name": …, "arguments": {…}}, …]` and nothing else. What is no such array is said."""

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
        """The buffer begins with `[`, and `marker` stood before it."""
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
        """After the last call: what still comes is text."""
        self.out += self.speech.say(self.take(len(self.buffer)))
        if self.ended:
            self.out += self.speech.finish()
        return False
