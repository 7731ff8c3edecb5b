"""Cuts a text that arrives in pieces where every tokenizer cuts it, for models that go on with appended text."""

from __future__ import annotations

import re
import unicodedata

PASSAGE = 1000
"""Characters after which a text goes on as another generation, at the end of a sentence: one to four minutes."""
LONGEST = 2 * PASSAGE
"""Characters of a passage without such an end."""
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]」』）】》〉]*+(?=\s)|[。！？｡।॥؟۔]|\n[^\S\n]*+\n")
"""Takes time in proportion to the text: a run of marks is tried once."""


class Words:
    """A text, in pieces of any size → longer pieces, and None at the end of each passage but the last.

    Joined, they are the text. A piece ends before a mark or space that follows a letter or digit: there a tokenizer
    splits a text whatever follows, so that the pieces have the tokens of the whole.
    """

    def __init__(self) -> None:
        self._held = ""
        self._size = 0
        """Characters of the passage that have been returned."""

    def feed(self, text: str) -> list[str | None]:
        """What is certain now."""
        known = len(self._held)  # there is no border before its end
        self._held += text
        done: list[str | None] = []
        while (end := self._passage_end()) is not None:
            done += [self._held[:end], None] if end else [None]
            self._held, self._size, known = self._held[end:], 0, 0
        if end := _last_border(self._held, known):
            done.append(self._held[:end])
            self._size += end
            self._held = self._held[end:]
        return done

    def finish(self) -> list[str | None]:
        """The rest."""
        rest, self._held = self._held, ""
        return [rest] if rest else []

    def _passage_end(self) -> int | None:
        """Where in the held text the passage ends, if it does; 0: before it."""
        least, most = max(0, PASSAGE - self._size), max(1, LONGEST - self._size)
        if match := _END.search(self._held, least, most):
            return match.end()
        if len(self._held) <= most:
            return None
        return _last_border(self._held[: most + 1]) or (0 if self._size else most)


def _last_border(text: str, after: int = 0) -> int:
    """The last place, from `after` on, where a piece may end; 0 if there is none."""
    for place in range(len(text) - 1, max(0, after - 1), -1):
        if text[place - 1].isalnum() and not text[place].isalnum() and unicodedata.category(text[place])[0] != "M":
            return place
    return 0
