"""A call as one JSON object, read character by character: `{"name": "…", "arguments": {…}}`."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

from segue.models.shared.dialects.pieces import CallArguments, CallBegun, ReplyPiece

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class Nested:
    """Finds the end of a JSON object or array."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, letter: str) -> bool:
        """Consume a letter; true if it closes the outermost bracket."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
            return False
        if letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        return self._depth == 0


class ArgumentsReader:
    """Reads only the arguments, if the format gives the name before them: an object, passed on as written."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._nested = Nested()
        self.done = False

    def read(self, text: str) -> tuple[int, list[ReplyPiece]]:
        """(number of letters used, pieces)."""
        for count, letter in enumerate(text, 1):
            if self._nested.push(letter):
                self.done = True
                return count, [CallArguments(self.index, text[:count])]
        return len(text), [CallArguments(self.index, text)] if text else []


class _At(Enum):
    OPEN = auto()
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    NESTED = auto()
    STRING = auto()
    SCALAR = auto()
    COMMA = auto()


class CallReader:
    """Reads one call. If `name` follows the arguments, they are held back until it comes.

    `failed`: this is not a call (another kind of object, or not JSON); `raw` holds the text read.
    """

    def __init__(self, index: int, known: Callable[[str], bool] = lambda name: True) -> None:
        """`known`: whether a tool of this name exists; otherwise the object is text."""
        self.index = index
        self._known = known
        self._at = _At.OPEN
        self._first_key = True
        self._key = ""
        self._value = ""
        self._nested = Nested()
        self._escaped = False
        self._waiting = ""
        """Arguments that came before the name."""
        self._source: str | None = None
        """The key of the arguments."""
        self._out: list[ReplyPiece] = []
        self._fragment = ""
        self.raw = ""
        self.begun = False
        self.done = False
        self.failed = False

    def read(self, text: str) -> tuple[int, list[ReplyPiece]]:
        """(number of letters used, pieces). The letter that makes it fail is not used."""
        used = 0
        for letter in text:
            if not self._push(letter):
                self.failed = True
                break
            used += 1
            if not self.begun:
                self.raw += letter
            if self.done:
                break
        self._flush()
        out, self._out = self._out, []
        return used, out

    def _push(self, letter: str) -> bool:
        """False if no call can continue with this letter."""
        match self._at:
            case _At.NESTED:
                self._add(letter)
                if self._nested.push(letter):
                    self._at = _At.COMMA
            case _At.STRING | _At.KEY_TEXT:
                return self._in_text(letter)
            case _At.SCALAR:
                if letter not in ",}" and letter not in _SPACE:
                    self._value += letter
                    return letter not in '{["'
                self._at = _At.COMMA
                return self._push(letter)
            case _ if letter in _SPACE:
                pass
            case _At.OPEN if letter == "{":
                self._at = _At.KEY
            case _At.KEY if letter == '"':
                self._at, self._key = _At.KEY_TEXT, ""
            case _At.KEY if letter == "}" and self._first_key:
                return False  # {} is not a call
            case _At.COLON if letter == ":":
                self._at, self._value = _At.VALUE, ""
            case _At.VALUE:
                return self._begin_value(letter)
            case _At.COMMA if letter == ",":
                self._at = _At.KEY
            case _At.COMMA if letter == "}":
                return self._close()
            case _:
                return False
        return True

    def _in_text(self, letter: str) -> bool:
        is_key = self._at is _At.KEY_TEXT
        if letter == '"' and not self._escaped:
            if is_key:
                self._at, self._first_key = _At.COLON, False
            else:
                self._value += letter
                return self._end_string()
            return True
        self._escaped = letter == "\\" and not self._escaped
        if is_key:
            self._key += letter
        else:
            self._value += letter
        return True

    def _begin_value(self, letter: str) -> bool:
        if letter in "{[":
            if self._key == "name" or (self._key in _ARGUMENTS and letter == "["):
                return False
            self._nested = Nested()
            self._nested.push(letter)
            self._at = _At.NESTED
            self._add(letter)
            return True
        self._value = letter
        self._at = _At.STRING if letter == '"' else _At.SCALAR
        return letter == '"' or self._key != "name"

    def _add(self, text: str) -> None:
        """Append to a value; emit it if it belongs to the arguments."""
        if self._key in _ARGUMENTS and self._source in (None, self._key):
            self._source = self._key
            self._fragment += text

    def _end_string(self) -> bool:
        self._at = _At.COMMA
        if self._key not in ("name", *_ARGUMENTS) or (self._key == "name" and self.begun):
            return True
        try:
            text = json.loads(self._value, strict=False)
        except ValueError:
            return False
        if self._key in _ARGUMENTS:  # some models write the object as a string
            self._add(text)
            return True
        if not text or not self._known(text):
            return False
        self._flush()
        self.begun = True
        self._out.append(CallBegun(self.index, text))
        self._fragment, self._waiting = self._waiting, ""
        return True

    def _close(self) -> bool:
        if not self.begun:
            return False
        self.done = True
        if self._source is None:
            self._out.append(CallArguments(self.index, "{}"))
        return True

    def _flush(self) -> None:
        """Emit the arguments read since the last time, or keep them until the name is known."""
        if self.begun and self._fragment:
            self._out.append(CallArguments(self.index, self._fragment))
        elif not self.begun:
            self._waiting += self._fragment
        self._fragment = ""
