"""Log-probabilities of the output's tokens as they are drawn, and of the prompt's tokens.

The distribution is the model's own, before penalties, filters and temperature (vLLM's `raw_logprobs`). A token's rank
is one more than the number of more likely tokens, so equally likely tokens share a rank.

Optional reading: `token_logprobs` reports the probabilities of a step's tokens to requests that ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.contract import StageRequest
from segue.kernels.staging import Readback, upload
from segue.messages.deltas import TokenLogprobs, TopToken
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Wanted:
    """The log-probabilities to report for one token position."""

    top: int = 0
    """Number of most likely tokens to report."""
    token_ids: tuple[int, ...] = ()
    """Report these tokens and the chosen one instead of the most likely ones."""


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of one prompt, gathered while it is prefilled."""

    wanted: Wanted
    found: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """By position; None for the first token, which has no context."""


def output_wanted(params: SamplingParams, vocab_size: int) -> Wanted | None:
    """None if no log-probabilities of the output are requested."""
    if params.logprobs is None and not params.logprob_token_ids:
        return None
    if params.logprob_token_ids:  # as in vLLM, the most likely ones are then not reported
        return Wanted(token_ids=tuple(dict.fromkeys(params.logprob_token_ids)))
    return Wanted(_count(params.logprobs or 0, vocab_size))


def prompt_wanted(params: SamplingParams, vocab_size: int) -> PromptLogprobs | None:
    """None if no log-probabilities of the prompt are requested."""
    if params.prompt_logprobs is None:
        return None
    return PromptLogprobs(Wanted(_count(params.prompt_logprobs, vocab_size)))


def _count(asked: int, vocab_size: int) -> int:
    return vocab_size if asked < 0 else min(asked, vocab_size)


def check_logprobs(request: StageRequest, most: int) -> None:
    """Raise `InvalidRequest` for more than `most` per token (-1: any number), or if the client gets no text."""
    params = request.sampling
    given = {
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "logprob_token_ids": len(params.logprob_token_ids) if params.logprob_token_ids else None,
    }
    for name, count in given.items():
        if count is None:
            continue
        path = f"sampling.{request.stage}.{name}"
        if "text" not in request.to_client:
            raise InvalidRequest(f"{path} is set, but the client gets no text from stage {request.stage!r}", field=path)
        if most >= 0 and (count < 0 or count > most):
            asked = "all tokens" if count < 0 else f"{count} tokens"
            raise InvalidRequest(
                f"{path} asks for {asked} per position; this deployment gives at most {most} (max_logprobs)",
                field=path,
            )


class Likelihoods:
    """Distributions of some rows, kept while their logits are changed and a token is drawn from each."""

    def __init__(self, logits: torch.Tensor, wanted: Seq[Wanted]) -> None:
        """`logits` [rows, vocab] float32, not modified; one entry of `wanted` per row."""
        self._scores = logits.log_softmax(dim=-1)
        self._wanted = wanted
        most = max(one.top for one in wanted)
        self._best = self._scores.topk(most, dim=-1) if most else None

    def of(self, chosen: Seq[int], vocabulary: Vocabulary | None) -> list[TokenLogprobs]:
        """The log-probabilities to report per row, given the `chosen` tokens."""
        asked = self.asked(upload(np.array(chosen, dtype=np.int64), self._scores.device))
        return token_logprobs(self._wanted, Readback(asked).wait(), vocabulary)

    def asked(self, chosen: torch.Tensor) -> list[torch.Tensor]:
        """Device tensors for `token_logprobs`. `chosen` [rows] long: the tokens.

        [rows, 1 + n] the chosen token, then those requested by id (rows with fewer repeat the chosen one);
        their log-probabilities; their ranks; [rows, most] the most likely tokens; their log-probabilities.
        """
        extra = max(len(one.token_ids) for one in self._wanted)
        ids = chosen[:, None]
        if extra:
            named = np.array([[*one.token_ids, *[-1] * (extra - len(one.token_ids))] for one in self._wanted])
            others = upload(named, ids.device)
            ids = torch.cat([ids, torch.where(others < 0, ids, others)], dim=1)
        values = self._scores.gather(1, ids)
        ranks = [(self._scores > values[:, [column]]).sum(dim=-1) + 1 for column in range(extra + 1)]
        best = (ids[:, :0], values[:, :0]) if self._best is None else (self._best.indices, self._best.values)
        return [ids, values, torch.stack(ranks, dim=1), *best]


def token_logprobs(wanted: Seq[Wanted], asked: Seq[np.ndarray], vocabulary: Vocabulary | None) -> list[TokenLogprobs]:
    """Log-probabilities per row, from the result of `Likelihoods.asked` copied to the host."""
    ids, values, places, best_ids, best_values = (array.tolist() for array in asked)
    said = _Texts(vocabulary)
    found = []
    for row, one in enumerate(wanted):
        top: list[TopToken] = []
        rank = 0
        for place, (token, value) in enumerate(zip(best_ids[row][: one.top], best_values[row], strict=False), 1):
            rank = place if not top or value < top[-1].logprob else rank
            top.append(said.token(token, value, rank))
        named = {
            ids[row][column]: said.token(ids[row][column], values[row][column], places[row][column])
            for column in range(len(one.token_ids) + 1)
        }
        if one.token_ids:
            top = sorted(named.values(), key=lambda token: token.rank)
        found.append(TokenLogprobs(named[ids[row][0]], top))
    return found


class _Texts:
    """Caches text and bytes of tokens."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, tuple[str, bytes]] = {}

    def token(self, token_id: int, logprob: float, rank: int) -> TopToken:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return TopToken(token_id, logprob, rank, *known)

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        if self._vocabulary is None:
            return "", b""
        [data] = self._vocabulary.token_bytes([token_id])
        return (data.decode(errors="replace") if data else self._vocabulary.name(token_id)), data
