"""Texts that must not be produced, and prompts that are cut to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

import torch

from segue.engines.autoregressive.contract import Prompt, Vocabulary
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


def truncated(prompt: Prompt, request: StageRequest, longest: int) -> Prompt:
    """The prompt's last tokens, as many as `truncate_prompt_tokens` says; `longest`: what fits, the reply's first
    token left out. Raises `InvalidRequest` for prompts that are more than text: a medium cannot be cut in two.
    """
    asked = request.sampling.truncate_prompt_tokens
    if asked is None:
        return prompt
    keep = longest if asked < 0 else asked
    length = len(prompt.token_ids)
    if length <= keep:
        return prompt
    counted = prompt.positions is None or torch.equal(
        prompt.positions.cpu(), torch.arange(length).expand_as(prompt.positions)
    )
    media = prompt.embeds is not None or prompt.identity is not None or prompt.extras
    if media or not counted or prompt.position_delta:
        field = f"sampling.{request.stage}.truncate_prompt_tokens"
        raise InvalidRequest(
            f"{field} is {asked}, but the prompt ({length} tokens) has more than text in it, which cannot be cut",
            field=field,
        )
    kinds = dict.fromkeys(prompt.modality_tokens, keep)
    return replace(prompt, token_ids=prompt.token_ids[-keep:], positions=None, modality_tokens=kinds)
