"""Calls of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""

from __future__ import annotations

from segue.models.shared.dialects.objects import ObjectMachine

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(ObjectMachine):
    """Content between the markers that is not a call becomes text, markers included."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self._text

    def _text(self) -> bool:
        found = self.text_until(OPEN)
        if found:
            self.expect(OPEN, then=self._close, otherwise=self._text)
        return found

    def _close(self) -> bool:
        self.skip_space()
        seen = self.sees(CLOSE)
        if seen is None:
            return False
        if seen:
            self.take(len(CLOSE))
        self.state = self._text
        return True
