"""Texts that must not be produced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy

from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.contract import StageRequest
from segue.messages.errors import InvalidRequest


class BadWords:
    """Forbids the last token of a text wherever those before it have just been generated (as vLLM does).

    A text is known by how it is tokenized, at the start of a text and after a space: one that comes about in other
    pieces is not seen.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._by_prefix: dict[tuple[int, ...], set[int]] = {}
        for ids in texts:
            if ids:
                self._by_prefix.setdefault(tuple(ids[:-1]), set()).add(ids[-1])
        longest = max((len(prefix) for prefix in self._by_prefix), default=0)
        self._tail: deque[int] = deque(maxlen=longest)

    def copy(self) -> BadWords:
        """The same texts, after the same output."""
        other = BadWords(())
        other._by_prefix, other._tail = self._by_prefix, self._tail.copy()
        return other

    def saw(self, token: int) -> None:
        """One more output token."""
        self._tail.append(token)

    def after(self, tokens: Iterable[int]) -> BadWords:
        """A copy that has seen these output tokens too."""
        other = copy(self)
        other._tail = deque([*self._tail, *tokens], maxlen=self._tail.maxlen)
        return other

    def forbidden(self) -> set[int]:
        """The tokens that would end one of the texts now."""
        tail = tuple(self._tail)
        found: set[int] = set()
        for length in range(len(tail) + 1):
            found |= self._by_prefix.get(tail[len(tail) - length :], set())
        return found


def bad_words(request: StageRequest, vocabulary: Vocabulary | None, vocab_size: int) -> BadWords | None:
    """None where none are given. Raises `InvalidRequest` for stages without a tokenizer."""
    words = request.sampling.bad_words
    if not words:
        return None
    if vocabulary is None:
        field = f"sampling.{request.stage}.bad_words"
        raise InvalidRequest(f"{field} is set, but stage {request.stage!r} has no tokenizer", field=field)
    ways = [vocabulary.encode(text) for word in words for text in (word.lstrip(), " " + word.lstrip())]
    return BadWords([ids for ids in ways if all(0 <= token < vocab_size for token in ids)])
