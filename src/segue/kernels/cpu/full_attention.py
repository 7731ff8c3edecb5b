"""Attention of many queries on a CPU in float32, by compiled code (`native/full_attention.h`).

Unsupported cases (masks that depend on the query, other dtypes and devices, gradients) and cases in which it is not
faster (few queries, wide heads) use torch's attention, with the same result up to rounding.

Measured against `scaled_dot_product_attention` on two shared cores of an AMD EPYC (Zen 4, AVX-512), as a share of the
speed of a 1024 x 1024 GEMM there (about 155 GFLOP/s), medians:

| batch x heads x tokens x dim | torch | here |
|---|---|---|
| 1 x 6 x 80 x 64, 16 x 6 x 80 x 64 | 19-24%, 31% | 52-55%, 61-69% |
| 1 x 6 x 272 x 64, 16 x 6 x 272 x 64 | 48-55%, 54-71% | 74-95%, 93-109% |
| 2 x 6 x 1040 x 64, 1 x 6 x 1040 x 128 | 81%, 89% | 109-114%, 105-117% |
| a chunk of 256 queries, 14 heads over 2 of 64, causal: first, after 1024 tokens | 29%, 62% | 75%, 110% |
| 1024 and 2048 queries, the same heads | 53%, 67% | 107%, 115% |

Chunks over a paged store took 0.16-0.6 of the time in all of 60 cases (2 to 2048 queries after 0 to 2000 tokens,
scattered blocks or not, windows or none). With AVX2 alone all is within 15% of that on this CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from segue.kernels.cpu.native import FullAttention, Library, library

_LEAST_TOKENS = 32
"""Queries and keys. For 16 x 16 torch takes 0.6 of the time, for 24 x 24 0.8-0.9, for 64 x 64 1.2-1.6 times as long."""
_MOST_DIM = 256
"""At 384 they are equal, at 512 torch takes 0.9 of the time."""

_LARGE = 1 << 15
"""Rows times tokens squared. A denoiser of images (preset `small` of its family) on the CPU above, with 2 µs more for
each call of torch in it: 1 row of 512 pixels 1.10 times as fast, 2 and 8 of 256 pixels 1.07 and 1.09 times; 1 of 128
pixels 0.95 times, so it is excluded."""


def full_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of every query to all keys: query [batch, heads, queries, dim], key and value [batch, heads, keys, dim]
    → [batch, heads, queries, value dim]. `mask`: like torch's, [batch or 1, heads or 1, queries or 1, keys]."""
    compiled = library()
    positive = scale is None or scale > 0
    if compiled is None or not positive or not _can(query, key, value, mask):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    batch, heads, queries, dim = query.shape
    seen = None if mask is None else mask.expand(batch, 1, 1, -1)[:, 0, 0]
    out = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    attend_fully(compiled, query, key, value, out, 1 / math.sqrt(dim) if scale is None else scale, seen=seen)
    return out


class CompiledAttention(TorchFunctionMode):
    """Within it, `full_attention` replaces `scaled_dot_product_attention` if the result is the same. Every call of
    torch takes 2 µs longer."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return _dispatched(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def compile_attention(modules: Iterable[nn.Module]) -> None:
    """Run these modules and their children within `CompiledAttention` in calls that are large enough. Their input is
    [rows, tokens, features], the first argument or `hidden_states`."""
    mode = CompiledAttention()
    within: list[bool] = []

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = given[0] if given else named.get("hidden_states")
        large = isinstance(hidden, torch.Tensor) and hidden.ndim == 3 and len(hidden) * hidden.shape[1] ** 2 > _LARGE
        within.append(large)
        if large:
            mode.__enter__()

    def leave(module: nn.Module, given: Any, made: Any) -> None:
        if within.pop():
            mode.__exit__(None, None, None)

    for module in modules:
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)


def _dispatched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Takes the arguments of `scaled_dot_product_attention`."""
    if dropout_p or is_causal or enable_gqa:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return full_attention(query, key, value, attn_mask, scale)


def _can(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    tensors = (query, key, value)
    return (
        query.ndim == 4
        and min(query.shape[2], key.shape[2]) >= _LEAST_TOKENS
        and max(query.shape[3], value.shape[3]) <= _MOST_DIM
        and all(one.dtype == torch.float32 and one.device.type == "cpu" and one.stride(3) == 1 for one in tensors)
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and (mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1))
        and not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))
        and not torch.compiler.is_compiling()
    )


def attend_fully(
    compiled: Library,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    seen: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
) -> None:
    """query [batch, heads, queries, dim], key [batch, kv_heads, keys, dim], value [batch, kv_heads, keys, value dim],
    written to `out` [batch, heads, queries, value dim]; all float32, their last stride 1, `scale` above 0.

    `seen`: [batch, keys] bool, whether a key is visible to any query. `spans`: [queries, 2] int32, the first key that
    each query sees and the key after the last; not together with `seen`. A query that sees no key gets 0. A row's
    result does not depend on the other rows of the batch, nor on keys that it does not see.
    """
    assert seen is None or spans is None
    if seen is not None and seen.stride(1) != 1:
        seen = seen.contiguous()
    batch, heads, queries, dim = query.shape
    _, kv_heads, keys, value_dim = value.shape
    _call(
        compiled,
        FullAttention(
            *(query.data_ptr(), *query.stride()[:3], key.data_ptr(), *key.stride()[:3]),
            *(value.data_ptr(), *value.stride()[:3], None, 0, 1),
            *((None, 0) if seen is None else (seen.data_ptr(), seen.stride(0))),
            None if spans is None else spans.data_ptr(),
            *(batch, heads, kv_heads, queries, keys, dim, value_dim, scale),
            *(out.data_ptr(), *out.stride()[:3]),
        ),
    )


def attend_chunk(
    compiled: Library,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    spans: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """One sequence over a paged store: query [heads, queries, dim], keys [slots, kv_heads, dim], values [slots,
    kv_heads, value dim], `blocks` [n] int32, written to `out` [queries, heads, value dim]; else like `attend_fully`."""
    heads, queries, dim = query.shape
    _, kv_heads, value_dim = values.shape
    _call(
        compiled,
        FullAttention(
            *(query.data_ptr(), 0, query.stride(0), query.stride(1)),
            *(keys.data_ptr(), 0, keys.stride(1), keys.stride(0)),
            *(values.data_ptr(), 0, values.stride(1), values.stride(0)),
            *(blocks.data_ptr(), 0, block_size, None, 0, spans.data_ptr()),
            *(1, heads, kv_heads, queries, len(blocks) * block_size, dim, value_dim, scale),
            *(out.data_ptr(), 0, out.stride(1), out.stride(0)),
        ),
    )


def _call(compiled: Library, given: FullAttention) -> None:
    threads = torch.get_num_threads()
    scratch = torch.empty(threads * compiled.full_scratch(given.dim, given.value_dim))
    compiled.full_attention(compiled.number, ctypes.byref(given), scratch.data_ptr(), threads)
