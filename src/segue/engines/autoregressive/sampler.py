"""Picks the next token of every row of a batch.

The draw for generated token i of a request depends only on its seed and i: a counter-based uniform number, looked up
in the cumulative distribution over the kept tokens in order of their ids. So a request draws the same tokens alone, in
any batch, after a preemption and after a resume.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from segue.engines.autoregressive.contract import TokenRule
from segue.engines.autoregressive.penalties import RowRules, apply_rules
from segue.engines.autoregressive.thinking import Thinking
from segue.engines.autoregressive.words import BadWords
from segue.kernels.staging import upload, upload_all
from segue.messages.sampling import GREEDY_BELOW, SamplingParams

_MASK = 2**64 - 1
_NUCLEUS = 512
"""How many of the most likely tokens are looked at first for top-p; more where they do not suffice."""


@dataclass(slots=True)
class RowSampler:
    """How one request picks tokens."""

    seed: int
    temperature: float
    """0: greedy."""
    top_k: int
    """0: all."""
    top_p: float
    min_p: float
    rules: RowRules

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        vocab_size: int,
        end_token_ids: Collection[int],
        words: BadWords | None = None,
        thinking: Thinking | None = None,
        own: TokenRule | None = None,
    ) -> RowSampler:
        temperature = 1.0 if params.temperature is None else params.temperature
        top_k = params.top_k or 0
        return cls(
            seed=seed & _MASK,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_k=top_k if 0 < top_k < vocab_size else 0,
            top_p=1.0 if params.top_p is None else params.top_p,
            min_p=params.min_p or 0.0,
            rules=RowRules(params, prompt, vocab_size, end_token_ids, words, thinking, own),
        )

    def saw(self, token: int) -> None:
        """One more output token of this request."""
        self.rules.saw(token)

    def after(self, tokens: Sequence[int]) -> RowSampler:
        """This sampler as it would be had it seen these output tokens too; itself where they would change nothing."""
        if not tokens or not self.rules.remember:
            return self
        return replace(self, rules=self.rules.after(tokens))


def uniform(seed: int, index: int) -> float:
    """Number `index` of the stream `seed`, in [0, 1): Philox 4x64 (Salmon et al., 2011), 53 bits."""
    bits = np.random.Philox(key=seed, counter=index).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[RowSampler], generated: Sequence[int]) -> list[int]:
    """One token id per row of `logits` [rows, vocab] float32, which may be changed; row r has `generated[r]` tokens."""
    if not all(row.rules.plain for row in rows):
        apply_rules(logits, [row.rules for row in rows], generated)
    return choose(logits, rows, generated).tolist()


def choose(logits: torch.Tensor, rows: Sequence[RowSampler], generated: Sequence[int]) -> torch.Tensor:
    """The same where the rules have been applied, as [rows] long on the device. Each row needs a token that is not
    forbidden; one of NaN gets some token of the vocabulary."""
    drawn = [index for index, row in enumerate(rows) if row.temperature]
    if len(drawn) == len(rows):
        return _draw(logits, rows, generated)
    tokens = logits.argmax(dim=-1)
    if drawn:
        some = upload(np.array(drawn), logits.device)
        mine, known = [rows[index] for index in drawn], [generated[index] for index in drawn]
        tokens.index_copy_(0, some, _draw(logits.index_select(0, some), mine, known))
    return tokens


class _Columns(NamedTuple):
    """[rows, 1] each, on the device."""

    draws: torch.Tensor
    """float64"""
    temperature: torch.Tensor
    """This and those below: float32."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[RowSampler], draws: Sequence[float], device: torch.device) -> _Columns:
        settings = np.array([(row.temperature, row.top_k, row.top_p, row.min_p) for row in rows], dtype=np.float32)
        numbers, settled = upload_all([np.array(draws, dtype=np.float64)[:, None], settings], device)
        return cls(numbers, *settled.split(1, dim=1))


def _draw(logits: torch.Tensor, rows: Sequence[RowSampler], generated: Sequence[int]) -> torch.Tensor:
    columns = _Columns.of(
        rows, [uniform(row.seed, index) for row, index in zip(rows, generated, strict=True)], logits.device
    )
    scores = _filter(logits, rows, columns)
    # float64: in float32 the tail of a large vocabulary would be lost in the sum
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp_().to(torch.float64)
    cumulative = weights.cumsum(dim=-1)
    # the first token whose cumulative weight exceeds the target: never one of weight 0
    found = torch.searchsorted(cumulative, columns.draws * cumulative[:, -1:], right=True)[:, 0]
    return found.clamp_(max=logits.shape[-1] - 1)  # behind the last one lies what comes of NaN


def filtered(logits: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """Scores after temperature, top-k, top-p and min-p, -inf where a token is out: transformers' warpers, in its order.

    A filter keeps every token that is as likely as the last one it keeps, so that the set does not hang on the order
    of equals (transformers' top-k does so too; its top-p splits them).
    """
    return _filter(logits, rows, _Columns.of(rows, [0.0] * len(rows), logits.device))


def _filter(logits: torch.Tensor, rows: Sequence[RowSampler], columns: _Columns) -> torch.Tensor:
    scores = logits / columns.temperature
    most = max(row.top_k for row in rows)
    if most:
        best = scores.topk(most, dim=-1).values
        last = (columns.top_k - 1).clamp_(min=0).long()
        lowest = best.gather(1, last).masked_fill_(columns.top_k == 0, float("-inf"))
        scores.masked_fill_(scores < lowest, float("-inf"))
    cut = [row for row in rows if row.top_p < 1.0]
    if cut:
        # top-k leaves so few, and equals of the last one
        few = all(0 < row.top_k <= _NUCLEUS for row in cut)
        scores.masked_fill_(scores < _nucleus(scores, columns.top_p, few=few), float("-inf"))
    if any(row.min_p for row in rows):
        lowest = scores.amax(dim=-1, keepdim=True) + columns.min_p.log()
        scores.masked_fill_(scores < lowest, float("-inf"))
    return scores


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor, *, few: bool) -> torch.Tensor:
    """[rows, 1]: the score of the least likely token that is needed to reach `top_p` (Holtzman et al., 2020, §3.1).

    `few`: behind the first `_NUCLEUS` tokens of a row that is cut, all that are left are as likely as the last of
    those, so it need not be asked (which would wait for the device) whether they suffice.
    """
    total = scores.logsumexp(dim=-1, keepdim=True)
    vocab = scores.shape[-1]
    width = min(_NUCLEUS, vocab)
    while True:
        best = scores.topk(width, dim=-1).values
        share = (best - total).exp_().cumsum(dim=-1)
        if few or width == vocab or bool((share[:, -1:] >= top_p).logical_or_(top_p >= 1.0).all()):
            break
        width = min(vocab, width * 8)
    # a token stays while those before it fall short of top_p
    before = share.roll(1, dims=-1)
    before[:, 0] = 0.0
    last = (before < top_p).sum(dim=-1, keepdim=True) - 1
    return best.gather(1, last).masked_fill_(top_p >= 1.0, float("-inf"))
