"""Incremental detokenisation and stop strings: never emits half a character or part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from segue.engines.autoregressive.contract import AutoregressiveModel
from segue.engines.contract import StageRequest
from segue.messages.errors import InvalidRequest, StageFailed

Decode = Callable[[Sequence[int]], str]

UNFINISHED = "\ufffd"
"""Tokenizers decode an incomplete UTF-8 character to this."""


class Detokenizer:
    """Decodes one request's output piece by piece; the pieces concatenate to the text of the whole.

    Tokens `[read, ...)` are decoded together with those of the previous piece (`[prefix, read)`), because some
    tokenizers drop a leading space: the new text is the part beyond the prefix's own text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""
        self._given = 0  # characters of the text after `read` that were already emitted

    def push(self, token: int) -> str:
        """Add a token and return the text that is now settled; possibly incomplete characters are held back."""
        self._ids.append(token)
        text = self._decode(self._ids[self._prefix :])[len(self._prefix_text) :]
        settled = text.rstrip(UNFINISHED)
        new = settled[self._given :]
        if text and len(settled) == len(text):
            self._prefix, self._read = self._read, len(self._ids)
            self._prefix_text = self._decode(self._ids[self._prefix : self._read])
            self._given = 0
        else:
            self._given = max(self._given, len(settled))
        return new

    def flush(self) -> str:
        """Return the text still held back, incomplete or not: the output has ended."""
        new = self._decode(self._ids[self._prefix :])[len(self._prefix_text) :][self._given :]
        self._given += len(new)
        return new


class StopStrings:
    """Finds the stop string that completes first, even across pieces."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """(text that can be emitted, whether a stop string was found). After a find the rest is dropped."""
        if not self._stops or not may_stop:
            text, self._held = self._held + text, ""
            return text, False
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start, self.found = min(ends)
            self._held = ""
            return text[: end if self._include else start], True
        keep = self._forming(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return the text held back for a stop string that did not complete."""
        text, self._held = self._held, ""
        return text

    def _forming(self, text: str) -> int:
        """Length of the longest suffix of `text` that starts a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextOutput:
    """Detokenises and searches for stop strings. Raises `InvalidRequest` for stages without text."""

    def __init__(self, model: AutoregressiveModel, request: StageRequest) -> None:
        sampling = request.sampling
        skip = sampling.skip_special_tokens is not False
        self._wanted = "text" in request.to_client
        try:
            model.decode_text([], skip_special_tokens=True)
        except StageFailed as error:
            field = f"sampling.{request.stage}.stop"
            raise InvalidRequest(f"{field} is set, but stage {request.stage!r} makes no text", field=field) from error
        self._include = bool(sampling.include_stop_str_in_output)
        self._detokenizer = Detokenizer(lambda ids: model.decode_text(ids, skip_special_tokens=skip))
        self._stops = StopStrings(sampling.stop or (), include=self._include)

    def push(self, token: int, *, ends: bool, may_stop: bool) -> tuple[str, bool]:
        """Returns (new text, whether a stop string was found). `ends`: the token ends the output and shows no text."""
        if ends and not self._include:
            return "", False
        text, found = self._stops.push(self._detokenizer.push(token), may_stop=may_stop)
        return (text if self._wanted else ""), found

    @property
    def found(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def flush(self, *, may_stop: bool) -> str:
        """Return the text held back; the output has ended without a stop string."""
        text, found = self._stops.push(self._detokenizer.flush(), may_stop=may_stop)
        text += "" if found else self._stops.flush()
        return text if self._wanted else ""
