"""Splits a text that arrives in pieces into sentences."""

from __future__ import annotations

import re

LONGEST = 400
"""Most characters of one sentence; a longer one is cut at a clause mark or a space."""
_END = re.compile(r"[.!?…。！？｡।॥؟۔]+[\"'”’»)\]」』）】》〉]*|\n[^\S\n]*\n")
"""What may end a sentence: its last marks with closing quotes and brackets, or an empty line."""
_EMPTY_LINE = re.compile(r"[^\S\n]*\n[^\S\n]*\n")
_ALONE = re.compile(r"[。！？｡।॥؟۔]")
"""Marks that end a sentence whatever follows them; the others need a space, or a character of a script without
spaces."""
_CLAUSE = re.compile(r"[,;:，、；：،؛]\s|[，、；：]|\s[–—-]\s")
_LAST_WORD = re.compile(r"[^\W\d_]+(?:\.[^\W\d_]+)*$")
_LIST_NUMBER = re.compile(r"\W*\d+$")
_EAST_ASIAN = "\u2e80"
"""The first character of the scripts without spaces."""
_TITLES = frozenset(
    [
        *("mr", "mrs", "ms", "dr", "prof", "st", "mme", "mlle", "hr", "fr", "gen", "col", "capt", "lt", "sgt", "rev"),
        *("hon", "sen", "rep", "gov", "vs", "cf", "ca", "approx"),
    ]
)
"""Abbreviations that precede a name or a word."""
_COUNTS = frozenset(("no", "nos", "nr", "fig", "figs", "vol", "p", "pp", "art", "sec", "ch", "eq"))
"""Abbreviations that precede a number."""


class Sentences:
    """A text, in pieces of any size → its sentences, each as soon as its end is certain.

    The sentences depend on the text, not on its pieces, and joined they are the text: spaces between two sentences
    begin the second one. Every sentence but the last has a letter or a digit. At most `LONGEST` characters are held.
    """

    def __init__(self) -> None:
        self._held = ""
        """The characters after the last sentence."""
        self._from = 0
        """Where in `_held` the next end may be."""

    def feed(self, text: str) -> list[str]:
        """The sentences that are complete now."""
        self._held += text
        return self._cut(final=False)

    def finish(self) -> list[str]:
        """The rest."""
        done = self._cut(final=True)
        rest, self._held, self._from = self._held, "", 0
        return [*done, rest] if rest else done

    def _cut(self, *, final: bool) -> list[str]:
        done: list[str] = []
        start = 0
        while (end := self._end(start, final=final)) is not None:
            done.append(self._held[start:end])
            start, self._from = end, 0
        self._held = self._held[start:]
        return done

    def _end(self, start: int, *, final: bool) -> int | None:
        """Where the sentence that begins at `start` ends; None if that is not certain yet. Only the first `LONGEST`
        characters count, so that the answer is the same however many have arrived."""
        window = self._held[start : start + LONGEST]
        over = len(self._held) - start > LONGEST
        complete = final and not over
        for match in _END.finditer(window, self._from):
            ends = _ends(window, match, complete=complete)
            if ends is None:
                if not over:
                    self._from = match.start()
                    return None
            elif ends:
                return start + match.end()
        # a mark at the very end may be the first of several: an empty line begins with the last line's end
        self._from = max(self._from, len(window.rstrip()))
        return start + _cut_at(window) if over else None


def _ends(window: str, match: re.Match[str], *, complete: bool) -> bool | None:
    """Whether the marks end a sentence; None if this depends on characters after the window."""
    before, marks, after = window[: match.start()], match[0], window[match.end() :]
    if not any(character.isalnum() for character in before):
        return False
    if marks[0] == "\n":
        return True
    if not after:
        return True if complete else None
    if _ALONE.search(marks):
        return True
    if not after[0].isspace():
        return after[0] >= _EAST_ASIAN
    following = after.lstrip()[:1]
    if _EMPTY_LINE.match(after):
        return True
    if not following:
        return True if complete else None
    if marks in ("!", "?"):
        return True
    if following.islower():
        return False
    return marks != "." or not _abbreviated(before, following)


def _abbreviated(before: str, following: str) -> bool:
    """Whether a full stop between these belongs to an abbreviation or a number of a list."""
    if _LIST_NUMBER.match(before):
        return True
    word = _LAST_WORD.search(before)
    if word is None:
        return False
    parts = word[0].lower().split(".")
    if all(len(part) == 1 for part in parts) or parts[-1] in _TITLES:
        return True
    return parts[-1] in _COUNTS and following.isdigit()


def _cut_at(window: str) -> int:
    """Where to cut a sentence that is too long: after its last clause mark, else at its last space, else at its end."""
    clauses = [match.end() for match in _CLAUSE.finditer(window, len(window) // 4)]
    if clauses:
        return clauses[-1]
    space = max(window.rfind(" "), window.rfind("\n"), window.rfind("\t"))
    return space if space > 0 and window[:space].strip() else len(window)
