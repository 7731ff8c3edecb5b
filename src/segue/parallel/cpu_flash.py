"""Flash attention on CPUs that also returns the log-sum-exp of each query's scores.

Parts of a ring attention are merged by the logarithm of their softmax denominators (Liu et al., "Ring Attention with
Blockwise Transformers for Near-Infinite Context", 2023, section 3; the merging rule is FlashAttention's, arXiv
2205.14135, section 3.1). The operator that returns it, `aten::_scaled_dot_product_flash_attention`, has no CPU kernel
in torch, only one under another name. Registered under the first name, it lets code for GPUs run unchanged on CPUs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch


def attention_with_weight(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference. [batch, heads, queries or keys, width] each → the attention's output, [batch, heads, queries,
    width], and the log-sum-exp of its scores, [batch, heads, queries]."""
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def join(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two results of `attention_with_weight` into the one over the keys of both."""
    weight = torch.logaddexp(one[1], other[1])
    shares = [torch.exp(part[1] - weight)[..., None] for part in (one, other)]
    return one[0] * shares[0] + other[0] * shares[1], weight


@functools.cache
def register_cpu_flash() -> torch.library.Library:
    """Register the CPU kernel with torch, for the lifetime of this process."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", _flash)
    return library


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Like `aten::_scaled_dot_product_flash_attention`; those of its nine results that only GPUs use are empty."""
    out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    none = query.new_empty(0)
    return out, weight, none, none, query.shape[2], key.shape[2], none, none, none
