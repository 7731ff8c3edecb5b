"""Calls of Mistral, in the formats of its tokenizer versions: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and
from version 11 on `[TOOL_CALLS]name{…}`, one marker per call, with `[CALL_ID]…` and `[ARGS]` before the arguments.
"""

from __future__ import annotations

import re

from segue.models.shared.dialects.array_of_calls import ArrayOfCalls
from segue.models.shared.dialects.json_call import ArgumentsReader
from segue.models.shared.dialects.pieces import CallBegun

MARKER = "[TOOL_CALLS]"
_HEADER = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\][^\[\]{]*)?(?:\[ARGS\])?\s*")


class MistralParser(ArrayOfCalls):
    """The letter after the marker decides between the formats."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self.behind

    def behind(self) -> bool:
        found = self.text_until(MARKER)
        if found:
            self._space = ""
            self.state = self._which
        return found

    def _which(self) -> bool:
        kept = self.buffer.lstrip()
        self._space += self.take(len(self.buffer) - len(kept))
        if not self.buffer and not self.ended:
            return False
        if self.buffer.startswith("["):
            self.array(MARKER + self._space)
        else:
            self.state = self._header
        return True

    def _header(self) -> bool:
        at = self.buffer.find("{")
        if at < 0 and not self.ended:
            return False
        header = self.take(at if at >= 0 else len(self.buffer))
        match = _HEADER.fullmatch(header)
        if at < 0 or match is None:
            self.out += self.speech.say(MARKER + self._space + header)
            self.state = self.behind
            return True
        self.speech.interrupt()
        self.out.append(CallBegun(self.calls, match["name"]))
        self._arguments = ArgumentsReader(self.calls)
        self.calls += 1
        self.state = self._reading
        return True

    def _reading(self) -> bool:
        used, pieces = self._arguments.read(self.buffer)
        self.take(used)
        self.out += pieces
        if not (self._arguments.done or self.ended):
            return False
        self.state = self.behind
        return True
