"""What all formats share whose calls are JSON objects: reading one, and what follows when it is one or is not."""

from __future__ import annotations

from collections.abc import Callable

from segue.models.dialects.json_call import CallReader
from segue.models.dialects.pieces import Machine, Speech

State = Callable[[], bool]


def any_name(name: str) -> bool:
    """Every name is taken for a tool's, also one that there is not: the client sees best what the model did."""
    return True


class ObjectMachine(Machine):
    """A machine with a state `object`, which reads one call."""

    def __init__(self) -> None:
        super().__init__()
        self.speech = Speech()
        self.calls = 0
        """Begun so far."""

    def expect(self, marker: str, *, then: State, otherwise: State, known: Callable[[str], bool] = any_name) -> None:
        """An object comes. `then` follows a whole call; `otherwise` what is none, or breaks off, which is said with the
        `marker` before it."""
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
        """Say what comes before `marker`; True where it came."""
        text, found = self.take_until(marker)
        self.out += self.speech.say(text)
        if self.ended and not found:
            self.out += self.speech.finish()
        return found
