"""Samples the next token of every row of a batch.

The draw for generated token i of a request depends only on its seed and i: a counter-based uniform number selects from
the cumulative distribution over the kept tokens in order of their ids. So a request draws the same tokens alone, in any
batch, after a preemption and after a resume.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from segue.engines.autoregressive.contract import TokenRule
from segue.engines.autoregressive.sample.penalties import BadWords, RowRules, apply_rules
from segue.engines.autoregressive.sample.thinking import Thinking
from segue.kernels.graphs.compiled import lacks_for_triton
from segue.kernels.staging import upload, upload_all
from segue.messages.sampling import GREEDY_BELOW, SamplingParams

_MASK = 2**64 - 1
_NUCLEUS = 512
"""Number of most likely tokens that top-p examines first; more if they do not suffice."""
_DRAWS = 64
"""Uniform numbers of a stream computed at once, because a call costs as much as a few of them."""


@dataclass(slots=True)
class Stream:
    """Precomputed uniform numbers of a request."""

    first: int = 0
    """Index of `numbers[0]` in the stream."""
    numbers: Sequence[float] = ()


@dataclass(slots=True)
class CodeStream:
    """Precomputed uniform numbers of a request for rows of codes."""

    first: int = 0
    """Index of the generated token that `numbers[0]` is for."""
    numbers: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    """[tokens, codes] float64"""


@dataclass(slots=True)
class RowSampler:
    """The sampling settings of one request."""

    seed: int
    temperature: float
    """0: greedy."""
    top_k: int
    """0: all."""
    top_p: float
    min_p: float
    rules: RowRules
    stream: Stream = field(default_factory=Stream)
    """The stream of `seed`; shared with the copies that `after` makes."""
    codes: CodeStream = field(default_factory=CodeStream)
    """The same for the further codes of rows."""

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
        """Record one more output token of this request."""
        self.rules.saw(token)

    def draw(self, index: int) -> float:
        """Number `index` of the stream `seed` (`uniforms`)."""
        stream = self.stream
        if not 0 <= index - stream.first < len(stream.numbers):
            stream.first, stream.numbers = index, uniforms(self.seed, index, _DRAWS)
        return stream.numbers[index - stream.first]

    def draw_codes(self, index: int, count: int) -> np.ndarray:
        """[count] numbers for the codes after the first of generated token `index` (`code_uniforms`)."""
        stream = self.codes
        if not 0 <= index - stream.first < len(stream.numbers):
            stream.first, stream.numbers = index, code_uniforms(self.seed, index, _DRAWS, count)
        return stream.numbers[index - stream.first]

    def after(self, tokens: Sequence[int]) -> RowSampler:
        """A copy of this sampler that has also seen these output tokens; itself if they would change nothing."""
        if not tokens or not self.rules.remember:
            return self
        return replace(self, rules=self.rules.after(tokens))


def uniforms(seed: int, first: int, count: int) -> list[float]:
    """Numbers `first` to `first + count - 1` of the stream `seed`, in [0, 1): Philox 4x64 (Salmon et al., 2011), the
    first word of each block, 53 bits."""
    words = np.random.Philox(key=seed, counter=first).random_raw(4 * count)[::4]
    numbers: list[float] = ((words >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def code_uniforms(seed: int, first: int, tokens: int, count: int) -> np.ndarray:
    """[tokens, count] float64 in [0, 1), for `count` codes of tokens `first` to `first + tokens - 1`: all words of
    blocks of the stream `seed` that `uniforms` does not reach, as many whole blocks per token as its codes need."""
    blocks = -(-count // 4)
    words = np.random.Philox(key=seed, counter=(1 << 64) + first * blocks).random_raw(4 * blocks * tokens)
    numbers: np.ndarray = (words.reshape(tokens, 4 * blocks)[:, :count] >> np.uint64(11)) * 2.0**-53
    return numbers


def sample(logits: torch.Tensor, rows: Sequence[RowSampler], generated: Sequence[int]) -> list[int]:
    """One token id per row of `logits` [rows, vocab] float32 (may be modified); row r has `generated[r]` tokens."""
    if not all(row.rules.plain for row in rows):
        apply_rules(logits, [row.rules for row in rows], generated)
    return choose(logits, rows, generated).tolist()


def choose(logits: torch.Tensor, rows: Sequence[RowSampler], generated: Sequence[int]) -> torch.Tensor:
    """Like `sample`, after rules were applied; returns [rows] long on the device. Each row must have an allowed token;
    a row of NaN gets an arbitrary token of the vocabulary."""
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
    """Per-row settings as device tensors, [rows, 1] each."""

    draws: torch.Tensor
    """float64"""
    temperature: torch.Tensor
    """float32, as are all below."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[RowSampler], draws: Sequence[float], device: torch.device) -> _Columns:
        settings = np.array([(row.temperature, row.top_k, row.top_p, row.min_p) for row in rows], dtype=np.float32)
        numbers, settled = upload_all([np.array(draws, dtype=np.float64)[:, None], settings], device)
        return cls(numbers, *settled.split(1, dim=1))


def _draw(logits: torch.Tensor, rows: Sequence[RowSampler], generated: Sequence[int]) -> torch.Tensor:
    columns = _Columns.of(rows, [row.draw(index) for row, index in zip(rows, generated, strict=True)], logits.device)
    scores = _filter(logits, rows, columns)
    # float64: in float32 the sum would lose the tail of a large vocabulary
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp_().to(torch.float64)
    cumulative = weights.cumsum(dim=-1)
    # the first token whose cumulative weight exceeds the target: never one of weight 0
    found = torch.searchsorted(cumulative, columns.draws * cumulative[:, -1:], right=True)[:, 0]
    return found.clamp_(max=logits.shape[-1] - 1)  # NaN gives an index past the last token


def filtered(logits: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """Scores after temperature, top-k, top-p and min-p, -inf for removed tokens: transformers' warpers, in their order.

    A filter keeps every token that is as likely as the last one it keeps, so the set does not depend on the order of
    ties (transformers' top-k does so too; its top-p splits them).
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
        scores.masked_fill_(scores < _lowest_kept(scores, columns, cut), float("-inf"))
    if any(row.min_p for row in rows):
        lowest = scores.amax(dim=-1, keepdim=True) + columns.min_p.log()
        scores.masked_fill_(scores < lowest, float("-inf"))
    return scores


def _lowest_kept(scores: torch.Tensor, columns: _Columns, cut: Sequence[RowSampler]) -> torch.Tensor:
    """[rows, 1]: the lowest score that top-p keeps; `cut`: the rows with such a limit.

    Top-k and the kernel differ by rounding, so a row's own `top_k`, not that of others, decides which of them runs.
    """
    few = [0 < row.top_k <= _NUCLEUS for row in cut]  # top-k leaves at most that many, plus ties of the last one
    if not _has_kernel(scores.device):
        return _nucleus(scores, columns.top_p, few=all(few))
    from segue.kernels.top_p import lowest_kept

    if all(few):
        return _nucleus(scores, columns.top_p, few=True)
    if not any(few):
        return lowest_kept(scores, columns.top_p)
    short = (columns.top_k > 0).logical_and_(columns.top_k <= _NUCLEUS)
    # either gives -inf where top_p is 1
    by_kernel = lowest_kept(scores, columns.top_p.masked_fill(short, 1.0))
    return _nucleus(scores, columns.top_p.masked_fill(~short, 1.0), few=True).maximum(by_kernel)


@cache
def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None and lacks_for_triton() is None


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor, *, few: bool) -> torch.Tensor:
    """[rows, 1]: the score of the least likely token needed to reach `top_p` (Holtzman et al., 2020, §3.1).

    `few`: in each limited row, all tokens left after the first `_NUCLEUS` are ties of the last of those, so there is
    no need to check (which would wait for the device) whether they suffice.
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
    # a token stays while the sum of those before it is below top_p
    before = share.roll(1, dims=-1)
    before[:, 0] = 0.0
    last = (before < top_p).sum(dim=-1, keepdim=True) - 1
    return best.gather(1, last).masked_fill_(top_p >= 1.0, float("-inf"))
