"""Calls of Llama 3: a JSON object with `name` and `parameters`, bare or after `<|python_tag|>`; `;` separates
several."""

from __future__ import annotations

from collections.abc import Callable

from segue.models.shared.dialects.objects import ObjectMachine

TAG = "<|python_tag|>"


class LlamaParser(ObjectMachine):
    """A bare object is a call only at the start of a reply and if a tool has its name: an answer may be JSON."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        super().__init__()
        self._known = known
        self.state = self._beginning

    def _beginning(self) -> bool:
        kept = self.buffer.lstrip()
        self.out += self.speech.say(self.take(len(self.buffer) - len(kept)))
        if not self.buffer and not self.ended:
            return False
        if self.buffer.startswith("{"):
            self.expect("", then=self._between, otherwise=self._text, known=self._known)
        else:
            self.state = self._text
        return True

    def _text(self) -> bool:
        found = self.text_until(TAG)
        if found:
            self.expect(TAG, then=self._between, otherwise=self._text)
        return found

    def _between(self) -> bool:
        """After a call: `;` and the next one, or text."""
        self.skip_space()
        if not self.buffer and not self.ended:
            return False
        if self.buffer.startswith(";"):
            self.take(1)
            self.expect(";", then=self._between, otherwise=self._text)
        else:
            self.state = self._text
        return True
