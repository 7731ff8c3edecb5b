"""Operations with one signature on every device: compiled kernels on a CPU in float32, else
torch's own operators. Results are equal up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.fused_linear import FusedPart
from segue.kernels.linear.linear import PackedLinear, packed_gemm


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of every query to all keys: query [batch, heads, queries, dim], key and value [batch, heads, keys, dim]
    → [batch, heads, queries, value dim]. `mask`: [batch or 1, heads or 1, queries or 1, keys], as for
    `scaled_dot_product_attention`."""
    compiled = cpu_kernels()
    if compiled is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return compiled.full_attention(query, key, value, mask)


def modulated_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm of x [batch, tokens, features] times `1 + scale`, plus `shift`, [batch, 1, features] each."""
    compiled = cpu_kernels() if _floats_on_cpu(x) else None
    if compiled is None:
        return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)
    return compiled.modulated_norm(x, scale, shift, eps)


def norm_and_rope(x: torch.Tensor, weight: torch.Tensor, eps: float, rotations: torch.Tensor | None) -> None:
    """RMSNorm and RoPE in place. x [batch, tokens, heads, features], heads and features contiguous: RMSNorm over the
    features with `weight` [features], then multiplied by `rotations`, [tokens, features / 2] complex, if given."""
    width = x.shape[-1]
    assert x.stride()[2:] == (width, 1)
    compiled = cpu_kernels() if _floats_on_cpu(x) else None
    if compiled is not None:
        return compiled.norm_and_rope(x, weight, eps, rotations)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width)
    x.mul_(squares.add_(eps).rsqrt_()).mul_(weight)
    if rotations is not None:
        torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rotations[:, None])
    return None


def snake(x: torch.Tensor, frequencies: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """`x + sin²(frequencies · x) · shares` of x [..., channels, samples], per channel (Ziyin et al., *Neural Networks
    Fail to Learn Periodic Functions*, 2020)."""
    compiled = cpu_kernels() if _floats_on_cpu(x) and frequencies.dtype == shares.dtype == x.dtype else None
    if compiled is not None:
        return compiled.snake(x, frequencies, shares)
    return torch.addcmul(x, (x * frequencies[:, None]).sin_().square_(), shares[:, None])


def then_gelu(linear: nn.Module, x: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU (`none` or `tanh`) of a linear layer; a packed layer fuses both into one pass, in 0.6 of the time."""
    if isinstance(linear, PackedLinear):
        return packed_gemm(x, linear.weight, linear.bias, linear.out_features, approximate)
    return functional.gelu(linear(x), approximate=approximate)


def joined_product(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """The concatenated outputs of the layers for x [..., inputs]: [..., sum of outputs]. One GEMM, if they are all the
    parts of one `FusedLinear`, in order."""
    first = layers[0]
    if isinstance(first, FusedPart) and len(first.whole.sizes) == len(layers):
        parts = [(layer.whole, layer.number) for layer in layers if isinstance(layer, FusedPart)]
        if parts == [(first.whole, number) for number in range(len(layers))]:
            made = first.whole.linear(x)
            assert isinstance(made, torch.Tensor)
            return made
    return torch.cat([layer(x) for layer in layers], dim=-1)


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
    one kept; the number selects from the cumulative distribution in order of the codes. So a row's
    code does not depend on the rows next to it. A row of NaN gets an arbitrary code of the vocabulary.
    """
    compiled = cpu_kernels() if _floats_on_cpu(logits) else None
    if compiled is not None and logits.shape[1] <= compiled.most_codes:
        return compiled.draw_codes(logits, numbers, greedy, temperature=temperature, top_k=top_k, top_p=top_p)
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
    return by_number(scores, numbers, greedy)


def by_number(scores: torch.Tensor, numbers: torch.Tensor, greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(one code per row [n] long, whether its scores are without NaN and +inf [n] bool). `scores` [n, vocab]."""
    # float64: in float32 the sum would lose the tail of a large vocabulary
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp().to(torch.float64)
    cumulative = weights.cumsum(dim=-1)
    whole = cumulative[:, -1:]
    found = torch.searchsorted(cumulative, numbers[:, None] * whole, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)
    return torch.where(greedy, scores.argmax(dim=-1), found), torch.isfinite(whole[:, 0])


def _floats_on_cpu(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"
