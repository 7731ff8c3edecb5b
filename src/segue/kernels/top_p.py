"""Top-p as a Triton kernel: finds the score of the least likely kept token without the host.

`topk` with a fixed width would have to ask the device whether the width sufficed, and a full sort of a large vocabulary
costs more than the rest of top-p. The kernel needs neither: the probability of all tokens with a score of at least x
falls as x grows, so it bisects over x, in at most 32 passes over a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096
"""Scores that are summed in one iteration."""


@triton.jit
def _ordered(bits):
    """Map float32 bits to int32 values of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["vocab"])
def _nucleus(scores_rv, top_p_r, lowest_r, vocab, stride_r, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_p_r + row)
    if top_p >= 1.0:
        tl.store(lowest_r + row, float("-inf"))
        return
    highest = tl.full([], float("-inf"), tl.float32)
    for at in range(0, vocab, tile):
        token = at + tl.arange(0, tile)
        score = tl.load(scores_rv + row * stride_r + token, mask=token < vocab, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(score, 0))
    total = tl.full([], 0.0, tl.float32)
    for at in range(0, vocab, tile):
        token = at + tl.arange(0, tile)
        score = tl.load(scores_rv + row * stride_r + token, mask=token < vocab, other=float("-inf"))
        total += tl.sum(tl.exp(score - highest), 0)
    # invariant: the tokens with scores from `low` on reach top_p, those above `high` do not
    low = _ordered(tl.full([], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    high = _ordered(highest.to(tl.int32, bitcast=True)).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.full([], 0.0, tl.float32)
        for at in range(0, vocab, tile):
            token = at + tl.arange(0, tile)
            score = tl.load(scores_rv + row * stride_r + token, mask=token < vocab, other=float("-inf"))
            kept = _ordered(score.to(tl.int32, bitcast=True)) >= middle
            reached += tl.sum(tl.where(kept, tl.exp(score - highest), 0.0), 0)
        enough = reached >= top_p * total
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    tl.store(lowest_r + row, _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True))


def lowest_kept(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """scores [rows, vocab], top_p [rows, 1] in (0, 1], both float32 → [rows, 1]: the score of the least likely token
    needed to reach `top_p` (Holtzman et al., 2020, §3.1), -inf if top_p is 1."""
    assert scores.dtype == top_p.dtype == torch.float32
    assert scores.stride(1) == 1
    lowest = scores.new_empty(len(scores), 1)
    _nucleus[(len(scores),)](
        scores, top_p.contiguous(), lowest, scores.shape[1], scores.stride(0), tile=_TILE, num_warps=8
    )
    return lowest
