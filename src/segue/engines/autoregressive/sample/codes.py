"""Draws the codes of rows, for many sequences at once and without the host.

Optional reading: only models that draw rows of codes call it.
"""

from __future__ import annotations

import torch


def draw_codes(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    greedy: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(one code per row [n] long, whether the row's logits are without NaN and +inf [n] bool).

    `logits` [n, vocab]; `numbers` [n] float64 in [0, 1); `greedy` [n] bool: take the most likely code. Temperature,
    top-k (0: all) and top-p apply in this order to all other rows, and keep all codes that are as likely as the last
    one kept, as in `sampler`; the number selects from the cumulative distribution in order of the codes. So a row's
    code does not depend on the rows next to it. A row of NaN gets an arbitrary code of the vocabulary.
    """
    scores = logits.float() / temperature
    vocab = scores.shape[-1]
    if 0 < top_k < vocab or top_p < 1.0:
        best = scores.topk(min(top_k or vocab, vocab), dim=-1).values
        lowest = best[:, -1:]
        if top_p < 1.0:
            total = scores.masked_fill(scores < lowest, float("-inf")).logsumexp(dim=-1, keepdim=True)
            share = (best - total).exp()
            # a code stays while the sum of those before it is below top_p
            last = ((share.cumsum(dim=-1) - share) < top_p).sum(dim=-1, keepdim=True) - 1
            lowest = best.gather(1, last.clamp(min=0))
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    return _by_number(scores, numbers, greedy)


def draw_heads(
    logits: torch.Tensor, numbers: torch.Tensor, greedy: torch.Tensor, filters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(one code per row and head [n, heads] long, whether the row's logits are without NaN and +inf [n] bool).

    `logits` [n, heads, vocab]; `numbers` [n, heads] float64 in [0, 1); `greedy` [n] bool; `filters` [n, 3] float64:
    temperature, top-k (0: all) and top-p of each row. Otherwise as `draw_codes`.
    """
    count, heads, vocab = logits.shape
    of_head = filters.repeat_interleave(heads, dim=0)
    temperature, top_k, top_p = of_head[:, :1], of_head[:, 1:2].long(), of_head[:, 2:]
    scores = logits.reshape(-1, vocab).float() / torch.where(temperature > 0, temperature, 1.0).float()
    best = scores.sort(dim=-1, descending=True).values
    kept = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    total = best.masked_fill(best < best.gather(1, kept - 1), float("-inf")).logsumexp(dim=-1, keepdim=True)
    share = (best - total).exp().double()
    # a code stays while the sum of those before it is below top_p
    within = torch.where(top_p < 1.0, ((share.cumsum(dim=-1) - share) < top_p).sum(dim=-1, keepdim=True), vocab)
    lowest = best.gather(1, torch.minimum(kept, within).clamp(min=1) - 1)
    scores = scores.masked_fill(scores < lowest, float("-inf"))
    codes, finite = _by_number(scores, numbers.reshape(-1), greedy.repeat_interleave(heads))
    return codes.reshape(count, heads), finite.reshape(count, heads).all(dim=-1)


def _by_number(scores: torch.Tensor, numbers: torch.Tensor, greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(one code per row [n] long, whether its scores are without NaN and +inf [n] bool). `scores` [n, vocab]."""
    # float64, as in `sampler`
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp().to(torch.float64)
    cumulative = weights.cumsum(dim=-1)
    whole = cumulative[:, -1:]
    found = torch.searchsorted(cumulative, numbers[:, None] * whole, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)
    return torch.where(greedy, scores.argmax(dim=-1), found), torch.isfinite(whole[:, 0])
