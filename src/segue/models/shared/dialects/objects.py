"""Shared by all formats whose calls are JSON objects: read one, then continue depending on whether it was a call."""

from __future__ import annotations

from collections.abc import Callable

from segue.models.shared.dialects.json_call import CallReader
from segue.models.shared.dialects.pieces import Machine, Speech

State = Callable[[], bool]


def any_name(name: str) -> bool:
    """Accept every name, even of a missing tool, so that the client sees the model's actual output."""
    return True


class ObjectMachine(Machine):
    """A machine with a state `object`, which reads one call."""

    def __init__(self) -> None:
        super().__init__()
        self.speech = Speech()
        self.calls = 0
        """Number of calls begun."""

    def expect(self, marker: str, *, then: State, otherwise: State, known: Callable[[str], bool] = any_name) -> None:
        """Expect an object. `then` follows a complete call; `otherwise` follows an object that is not a call or breaks
        off, which becomes text together with the `marker` before it."""
        self._marker, self._then, self._otherwise = marker, then, otherwise
        self._reader = CallReader(self.calls, known)
        self.state = self._object

    def _object(self) -> bool:
        used, pieces = self._reader.read(self.buffer)
        self.take(used)
        if self._reader.begun and self.calls == self._reader.index:
            self.calls += 1
            self.speech.interrupt()
        self.out += pieces
        if self._reader.done:
            self.state = self._then
        elif self._reader.failed or self.ended:
            if not self._reader.begun:
                self.out += self.speech.say(self._marker + self._reader.raw)
            self.state = self._otherwise
        else:
            return False
        return True

    def text_until(self, marker: str) -> bool:
        """Emit the text before `marker`; true if the marker came."""
        text, found = self.take_until(marker)
        self.out += self.speech.say(text)
        if self.ended and not found:
            self.out += self.speech.finish()
        return found
