"""What changes the logits of single tokens: bias, penalties for what was seen, tokens that are forbidden.

All of it touches few entries of a row, so each kind is one gather and one scatter over the batch's
(row, token) pairs, whatever the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy, deepcopy

import numpy as np
import torch

from segue.engines.autoregressive.contract import TokenRule
from segue.engines.autoregressive.thinking import Thinking
from segue.engines.autoregressive.words import BadWords
from segue.kernels.staging import upload
from segue.messages.sampling import SamplingParams

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class SeenTokens:
    """The distinct tokens of prompt and output, and how often each stood in the output."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        # placeholders of media may lie outside the vocabulary: nothing to penalise
        self._vocab_size = vocab_size
        known = dict.fromkeys(token for token in prompt if 0 <= token < vocab_size)
        self._place = {token: place for place, token in enumerate(known)}
        self._size = len(known)
        self._ids = np.fromiter(known, dtype=np.int64, count=self._size)
        self._counts = np.zeros(self._size, dtype=np.float32)

    def add(self, token: int) -> None:
        """One more output token."""
        if token >= self._vocab_size:
            return
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if self._size == len(self._ids):
                room = max(64, self._size)
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    def after(self, tokens: Iterable[int]) -> SeenTokens:
        """A copy with these output tokens more."""
        other = copy(self)
        other._place = dict(self._place)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        for token in tokens:
            other.add(token)
        return other

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """float32, beside `ids`: 0 for tokens of the prompt only."""
        return self._counts[: self._size]


class RowRules:
    """The token-wise rules of one request."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        end_token_ids: Collection[int],
        words: BadWords | None = None,
        thinking: Thinking | None = None,
        own: TokenRule | None = None,
    ) -> None:
        """`own`: the family's, which is copied."""
        self.repetition = _set(params.repetition_penalty, 1.0)
        self.presence = _set(params.presence_penalty, 0.0)
        self.frequency = _set(params.frequency_penalty, 0.0)
        self.min_tokens = params.min_tokens or 0
        self.suppressed = _ids(params.suppress_tokens or (), vocab_size)
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, vocab_size)
        self.words = words
        self.thinking = thinking
        self.own = None if own is None else own.copy()
        # forbidden until `min_tokens`, with `ignore_eos` too: who asks for so many tokens wants no end among them
        ends = {*(params.stop_token_ids or ()), *end_token_ids}
        self.ends = _ids(ends, vocab_size)
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
        self.bias_ids = _ids(bias, vocab_size)
        self.bias = np.array([bias[int(token)] for token in self.bias_ids], dtype=np.float32)
        counted = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        self.seen = SeenTokens(prompt, vocab_size) if counted else None

    def after(self, tokens: Sequence[int]) -> RowRules:
        """These rules as they would be after these output tokens more."""
        other = copy(self)
        other.seen = None if self.seen is None else self.seen.after(tokens)
        other.words = None if self.words is None else self.words.after(tokens)
        other.thinking = None if self.thinking is None else self.thinking.after(tokens)
        if self.own is not None:
            other.own = self.own.copy()
            for token in tokens:
                other.own.saw(token)
        return other

    @property
    def remember(self) -> bool:
        """What they do depends on which tokens came before."""
        remembers = self.own is not None and self.own.remembers
        return remembers or self.seen is not None or self.words is not None or self.thinking is not None

    @property
    def plain(self) -> bool:
        """The rules never change a logit."""
        return self.seen is None and not len(self.bias_ids) and not self.forbids

    @property
    def forbids(self) -> bool:
        """The rules may forbid tokens."""
        restricted = self.allowed is not None or self.words is not None or self.thinking is not None
        return restricted or self.own is not None or bool(len(self.suppressed)) or bool(self.min_tokens)

    def saw(self, token: int) -> None:
        """One more output token."""
        if self.seen is not None:
            self.seen.add(token)
        if self.words is not None:
            self.words.saw(token)
        if self.thinking is not None:
            self.thinking.saw(token)
        if self.own is not None:
            self.own.saw(token)

    def have_seen(self, other: RowRules) -> None:
        """Take over the output of another sequence of the same request."""
        self.seen, self.words = deepcopy(other.seen), None if other.words is None else other.words.copy()
        self.thinking = None if other.thinking is None else other.thinking.copy()
        self.own = None if other.own is None else other.own.copy()

    def forbidden(self, generated: int) -> Ids:
        """Tokens that may not come now, `allowed` apart."""
        parts = [self.suppressed]
        if generated < self.min_tokens:
            parts.append(self.ends)
        if self.words is not None and (ended := self.words.forbidden()):
            parts.append(np.array(sorted(ended), dtype=np.int64))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


def apply_rules(logits: torch.Tensor, rules: Sequence[RowRules], generated: Sequence[int]) -> None:
    """Change `logits` [rows, vocab] float32 in place; `generated[r]` tokens were generated in row r before.

    Order as in transformers' `_get_logits_processor`: bias, repetition, (presence, frequency: OpenAI's, not in
    transformers), then what is forbidden: all but the allowed tokens, suppressed ones, the end before the minimum
    length, the ends of bad words; then what the family itself forbids; and last what must come now, whatever else is
    said. A row of which nothing is left is all -inf.
    """
    bias = _pairs((row, rule.bias_ids, rule.bias) for row, rule in enumerate(rules))
    if bias is not None:
        rows, ids, values = (_on(logits, array) for array in bias)
        logits[rows, ids] += values
    _penalise(logits, rules)
    _allow(logits, rules)
    forbidden = [rule.forbidden(done) for rule, done in zip(rules, generated, strict=True)]
    none = _pairs((row, ids, ids) for row, ids in enumerate(forbidden))
    if none is not None:
        logits[_on(logits, none[0]), _on(logits, none[1])] = float("-inf")
    for row, rule in enumerate(rules):
        if rule.own is not None:
            rule.own.apply(logits[row], generated[row])
    _force(logits, rules)


def _force(logits: torch.Tensor, rules: Sequence[RowRules]) -> None:
    found = [None if rule.thinking is None else rule.thinking.forced for rule in rules]
    forced = [(row, token) for row, token in enumerate(found) if token is not None]
    if not forced:
        return
    rows, ids = (_on(logits, np.array(column, dtype=np.int64)) for column in zip(*forced, strict=True))
    scores = logits[rows, ids].nan_to_num_(neginf=0.0)  # it comes although something forbids it
    logits[rows] = float("-inf")
    logits[rows, ids] = scores


def _allow(logits: torch.Tensor, rules: Sequence[RowRules]) -> None:
    kept = _pairs((row, rule.allowed, rule.allowed) for row, rule in enumerate(rules) if rule.allowed is not None)
    if kept is None:
        return
    rows, ids = _on(logits, kept[0]), _on(logits, kept[1])
    scores = logits[rows, ids]
    logits[_on(logits, np.unique(kept[0]))] = float("-inf")
    logits[rows, ids] = scores


def _penalise(logits: torch.Tensor, rules: Sequence[RowRules]) -> None:
    counted = [(row, rule, rule.seen) for row, rule in enumerate(rules) if rule.seen is not None]
    seen = _pairs((row, tokens.ids, tokens.counts) for row, _, tokens in counted)
    if seen is None:
        return
    rows, ids, counts = (_on(logits, array) for array in seen)
    sizes = [len(tokens.ids) for _, _, tokens in counted]
    factors = ([rule.repetition, rule.presence, rule.frequency] for _, rule, _ in counted)
    spread = np.repeat(np.array(list(factors), dtype=np.float32), sizes, axis=0)
    repetition, presence, frequency = _on(logits, spread).unbind(1)
    score = logits[rows, ids]
    score = torch.where(score < 0, score * repetition, score / repetition)
    score -= presence * (counts > 0) + frequency * counts
    logits[rows, ids] = score


def _pairs(entries: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...] | None:
    """(rows, ids, values) flat over the batch, or None where there is nothing."""
    filled = [(row, ids, values) for row, ids, values in entries if len(ids)]
    if not filled:
        return None
    rows = np.repeat([row for row, _, _ in filled], [len(ids) for _, ids, _ in filled])
    return rows, np.concatenate([ids for _, ids, _ in filled]), np.concatenate([values for _, _, values in filled])


def _on(like: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    return upload(array, like.device)


def _ids(tokens: Iterable[int], vocab_size: int) -> Ids:
    return np.array(sorted({token for token in tokens if 0 <= token < vocab_size}), dtype=np.int64)


def _set(value: float | None, default: float) -> float:
    return default if value is None else value
