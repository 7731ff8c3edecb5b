"""Draws the codes of rows, for many sequences at once and without the host.

Optional reading: only models that draw rows of codes call it.
"""

from __future__ import annotations

import torch

from segue.kernels.operations import by_number


def draw_heads(
    logits: torch.Tensor, numbers: torch.Tensor, greedy: torch.Tensor, filters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(one code per row and head [n, heads] long, whether the row's logits are without NaN and +inf [n] bool).

    `logits` [n, heads, vocab]; `numbers` [n, heads] float64 in [0, 1); `greedy` [n] bool; `filters` [n, 3] float64:
    temperature, top-k (0: all) and top-p of each row. Otherwise as `draw_codes` of `segue.kernels.operations`.
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
    codes, finite = by_number(scores, numbers.reshape(-1), greedy.repeat_interleave(heads))
    return codes.reshape(count, heads), finite.reshape(count, heads).all(dim=-1)
