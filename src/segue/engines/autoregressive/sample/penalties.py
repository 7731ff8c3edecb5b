"""Token-wise changes of logits: bias, penalties for tokens seen before, forbidden tokens and bad words.

Each touches few entries of a row, so each kind is one gather and one scatter over the batch's (row, token) pairs,
whatever the size of the vocabulary.

Optional reading: `apply_rules` changes the logits of a step before tokens are drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from copy import copy, deepcopy

import numpy as np
import torch

from segue.engines.autoregressive.contract import TokenRule, Vocabulary
from segue.engines.autoregressive.sample.thinking import Thinking
from segue.engines.contract import StageRequest
from segue.kernels.staging import upload
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams


class BadWords:
    """Forbids the last token of a text if the tokens before it have just been generated (as vLLM does).

    A text is matched as it is tokenized at the start of a text and after a space: another tokenization of it is not
    detected.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._by_prefix: dict[tuple[int, ...], set[int]] = {}
        for ids in texts:
            if ids:
                self._by_prefix.setdefault(tuple(ids[:-1]), set()).add(ids[-1])
        longest = max((len(prefix) for prefix in self._by_prefix), default=0)
        self._tail: deque[int] = deque(maxlen=longest)

    def copy(self) -> BadWords:
        """An independent copy with the same texts and the same output seen."""
        other = BadWords(())
        other._by_prefix, other._tail = self._by_prefix, self._tail.copy()
        return other

    def saw(self, token: int) -> None:
        """Record one more output token."""
        self._tail.append(token)

    def after(self, tokens: Iterable[int]) -> BadWords:
        """A copy that has also seen these output tokens."""
        other = copy(self)
        other._tail = deque([*self._tail, *tokens], maxlen=self._tail.maxlen)
        return other

    def forbidden(self) -> set[int]:
        """The tokens that would now complete one of the texts."""
        tail = tuple(self._tail)
        found: set[int] = set()
        for length in range(len(tail) + 1):
            found |= self._by_prefix.get(tail[len(tail) - length :], set())
        return found


def bad_words(request: StageRequest, vocabulary: Vocabulary | None, vocab_size: int) -> BadWords | None:
    """None if the request has none. Raises `InvalidRequest` for stages without a tokenizer."""
    words = request.sampling.bad_words
    if not words:
        return None
    if vocabulary is None:
        field = f"sampling.{request.stage}.bad_words"
        raise InvalidRequest(f"{field} is set, but stage {request.stage!r} has no tokenizer", field=field)
    ways = [vocabulary.encode(text) for word in words for text in (word.lstrip(), " " + word.lstrip())]
    return BadWords([ids for ids in ways if all(0 <= token < vocab_size for token in ids)])


Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class SeenTokens:
    """The distinct tokens of prompt and output, and how often each occurs in the output."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        # media placeholders may lie outside the vocabulary: not penalised
        self._vocab_size = vocab_size
        known = dict.fromkeys(token for token in prompt if 0 <= token < vocab_size)
        self._place = {token: place for place, token in enumerate(known)}
        self._size = len(known)
        self._ids = np.fromiter(known, dtype=np.int64, count=self._size)
        self._counts = np.zeros(self._size, dtype=np.float32)

    def add(self, token: int) -> None:
        """Record one more output token."""
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
        """A copy with these output tokens added."""
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
        """float32, parallel to `ids`: 0 for tokens that occur only in the prompt."""
        return self._counts[: self._size]


class RowRules:
    """The token-wise logit rules of one request."""

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
        """`own`: the family's rule, which is copied."""
        self.repetition = _set(params.repetition_penalty, 1.0)
        self.presence = _set(params.presence_penalty, 0.0)
        self.frequency = _set(params.frequency_penalty, 0.0)
        self.min_tokens = params.min_tokens or 0
        self.suppressed = _ids(params.suppress_tokens or (), vocab_size)
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, vocab_size)
        self.words = words
        self.thinking = thinking
        self.own = None if own is None else own.copy()
        # forbidden until `min_tokens`, also with `ignore_eos`: a minimum length rules out any earlier end
        ends = {*(params.stop_token_ids or ()), *end_token_ids}
        self.ends = _ids(ends, vocab_size)
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
        self.bias_ids = _ids(bias, vocab_size)
        self.bias = np.array([bias[int(token)] for token in self.bias_ids], dtype=np.float32)
        counted = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        self.seen = SeenTokens(prompt, vocab_size) if counted else None

    def after(self, tokens: Sequence[int]) -> RowRules:
        """A copy of these rules after these further output tokens."""
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
        """Whether the rules depend on which tokens came before."""
        remembers = self.own is not None and self.own.remembers
        return remembers or self.seen is not None or self.words is not None or self.thinking is not None

    @property
    def plain(self) -> bool:
        """Whether the rules never change a logit."""
        return self.seen is None and not len(self.bias_ids) and not self.forbids

    @property
    def forbids(self) -> bool:
        """Whether the rules may forbid tokens."""
        restricted = self.allowed is not None or self.words is not None or self.thinking is not None
        return restricted or self.own is not None or bool(len(self.suppressed)) or bool(self.min_tokens)

    def saw(self, token: int) -> None:
        """Record one more output token."""
        if self.seen is not None:
            self.seen.add(token)
        if self.words is not None:
            self.words.saw(token)
        if self.thinking is not None:
            self.thinking.saw(token)
        if self.own is not None:
            self.own.saw(token)

    def have_seen(self, other: RowRules) -> None:
        """Take over the recorded output of another sequence of the same request."""
        self.seen, self.words = deepcopy(other.seen), None if other.words is None else other.words.copy()
        self.thinking = None if other.thinking is None else other.thinking.copy()
        self.own = None if other.own is None else other.own.copy()

    def forbidden(self, generated: int) -> Ids:
        """Tokens that are forbidden next, not counting `allowed`."""
        parts = [self.suppressed]
        if generated < self.min_tokens:
            parts.append(self.ends)
        if self.words is not None and (ended := self.words.forbidden()):
            parts.append(np.array(sorted(ended), dtype=np.int64))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


def apply_rules(logits: torch.Tensor, rules: Sequence[RowRules], generated: Sequence[int]) -> None:
    """Change `logits` [rows, vocab] float32 in place; row r has `generated[r]` tokens so far.

    Order as in transformers' `_get_logits_processor`: bias, repetition, (presence, frequency: OpenAI's, not in
    transformers), then forbidden tokens: all but the allowed ones, suppressed ones, end tokens before the minimum
    length, the ends of bad words; then the family's own rule; last, a forced token, which overrides all others. A row
    with every token forbidden is all -inf.
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
    scores = logits[rows, ids].nan_to_num_(neginf=0.0)  # a forced token overrides rules that forbid it
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
    """(rows, ids, values) flattened over the batch, or None if there are none."""
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
