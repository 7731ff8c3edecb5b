"""Attention over a paged KV cache as Triton kernels: chunks of queries (prefill), and single queries (decode).

Prefill is FlashAttention-2's forward pass (Dao, 2023, §3.1) with K and V read through block tables. Decode splits the
keys of a sequence over several programs, because one query alone does not fill a GPU, and puts the parts together by
their log-sum-exp (Flash-Decoding: Dao et al., 2023); the query heads that share a K/V head are the rows of its
products, so that K and V are read once.

Legend: n sequences, t tokens, h query heads, k K/V heads, d head width, e value width, b blocks, s block size.
Every function here has a plain torch counterpart in `segue.kernels.paged_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from segue.kernels.form import Form

_FEWEST_ROWS = 16  # of a matrix product in Triton
_SPLIT_KEYS = 256
"""Fewest keys a program of the split decode is worth."""
_MOST_SPLITS = 64
_JOINED = 16
"""Parts that are put together at once."""

# What differs from step to step must not be compiled for: Triton makes another kernel of an integer that is 1 or a
# multiple of 16, and of a pointer to the middle of a tensor. Such a kernel would take seconds while requests wait.
_TABLES = ("blocks_nb", "lengths_n", "begins_n", "counts_n", "reaches_t")


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Of the loop over keys: those behind the first are loaded ahead, into shared memory."""


def tile(width: int, dtype: torch.dtype) -> Tile:
    """For heads of `width` numbers, padded. With these no kernel needs more than the 227 KiB of shared memory and the
    255 registers per thread of a Hopper (seen in what the compiler makes for one)."""
    if dtype.itemsize > 2:  # products without tensor cores: small ones, or the registers do not suffice
        return Tile(32, 32, 4 if width <= 128 else 8, 2 if width <= 256 else 1)
    if width <= 128:
        return Tile(64, 64, 4, 3)
    return Tile(64, 32, 8, 2)


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the sequences of a call have their K and V. All int32, on the device."""

    blocks: torch.Tensor
    """[n, most]: block tables; what is behind a sequence's last block is not read."""
    lengths: torch.Tensor
    """[n] keys of each sequence, those of its own queries included."""


@triton.jit
def _capped(scores, softcap):
    """`softcap * tanh(scores / softcap)`; tanh by the logistic function, which every backend has."""
    return softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)


@triton.jit
def _slots(blocks_b, key, there, block_size: tl.constexpr):
    """Where the keys of one sequence lie in the cache; `blocks_b`: its block table."""
    block = tl.load(blocks_b + key // block_size, mask=there, other=0).to(tl.int64)
    return block * block_size + key % block_size


@triton.jit
def _scores(q, k, scaling, softcap, has_cap: tl.constexpr, precision: tl.constexpr):
    """[queries, d], [d, keys] → [queries, keys]."""
    scores = tl.dot(q, k, input_precision=precision) * scaling
    if has_cap:
        scores = _capped(scores, softcap)
    return scores


@triton.jit
def _online(scores, best, total, mixed):
    """One step of the online softmax: (weights, new best, new total, `mixed` brought to the new best)."""
    new = tl.maximum(best, tl.max(scores, 1))
    # a row that has seen nothing yet has -inf for its best: -inf - -inf would be NaN
    safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - safe[:, None])
    keep = tl.exp(best - safe)
    return weights, new, total * keep + tl.sum(weights, 1), mixed * keep[:, None]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_TABLES)
def _prefill(
    q_thd, k_bskd, v_bske, out_the, sinks_h, blocks_nb, lengths_n, begins_n, counts_n, reaches_t,
    scaling, softcap, table_stride,
    q_stride_t, q_stride_h, k_stride_s, k_stride_k, v_stride_s, v_stride_k, out_stride_t, out_stride_h,
    group: tl.constexpr, block_size: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    padded: tl.constexpr, value_padded: tl.constexpr,
    window: tl.constexpr, has_cap: tl.constexpr, has_sinks: tl.constexpr, has_reaches: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts_n + sequence)
    first = part * queries
    if first >= count:
        return
    begin = tl.load(begins_n + sequence)
    length = tl.load(lengths_n + sequence)
    before = length - count
    kv_head = head // group

    row = first + tl.arange(0, queries)
    dim, value_dim = tl.arange(0, padded), tl.arange(0, value_padded)
    inside = row < count
    place = before + row
    q = tl.load(
        q_thd + (begin + row)[:, None] * q_stride_t + head * q_stride_h + dim[None, :],
        mask=inside[:, None] & (dim < width)[None, :], other=0.0,
    )  # fmt: skip

    best = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, value_padded], tl.float32)
    if has_sinks:
        sink = tl.load(sinks_h + head).to(tl.float32)
        best = tl.full([queries], 0.0, tl.float32) + sink
        total = tl.full([queries], 1.0, tl.float32)

    stop = tl.minimum(length, before + first + queries)
    reach = place + 1
    if has_reaches:
        reach = tl.load(reaches_t + begin + row, mask=inside, other=0)
        stop = tl.minimum(length, tl.maximum(stop, tl.max(reach, 0)))
    start = 0
    if window > 0:
        start = tl.maximum(before + first - window + 1, 0) // keys * keys
    for at in range(start, stop, keys):
        key = at + tl.arange(0, keys)
        there = key < stop
        slot = _slots(blocks_nb + sequence * table_stride, key, there, block_size)
        k = tl.load(
            k_bskd + slot[None, :] * k_stride_s + kv_head * k_stride_k + dim[:, None],
            mask=there[None, :] & (dim < width)[:, None], other=0.0,
        ).to(q.dtype)  # fmt: skip
        scores = _scores(q, k, scaling, softcap, has_cap, precision)
        seen = (key[None, :] < reach[:, None]) & there[None, :]
        if window > 0:
            seen = seen & (key[None, :] > place[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        weights, best, total, mixed = _online(scores, best, total, mixed)
        v = tl.load(
            v_bske + slot[:, None] * v_stride_s + kv_head * v_stride_k + value_dim[None, :],
            mask=there[:, None] & (value_dim < value_width)[None, :], other=0.0,
        ).to(q.dtype)  # fmt: skip
        mixed += tl.dot(weights.to(q.dtype), v, input_precision=precision)

    # rows behind the last query may have seen nothing
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_the + (begin + row)[:, None] * out_stride_t + head * out_stride_h + value_dim[None, :],
        mixed.to(out_the.dtype.element_ty),
        mask=inside[:, None] & (value_dim < value_width)[None, :],
    )


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=_TABLES)
def _decode_parts(
    q_nhd, k_bskd, v_bske, parts_nhpe, sums_nhp, blocks_nb, lengths_n,
    scaling, softcap, table_stride, heads, splits,
    q_stride_n, q_stride_h, k_stride_s, k_stride_k, v_stride_s, v_stride_k,
    group: tl.constexpr, rows: tl.constexpr, block_size: tl.constexpr, width: tl.constexpr,
    value_width: tl.constexpr, padded: tl.constexpr, value_padded: tl.constexpr,
    window: tl.constexpr, has_cap: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_n + sequence)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, splits), keys) * keys
    start = first + split * share
    stop = tl.minimum(start + share, length)

    row = tl.arange(0, rows)
    dim, value_dim = tl.arange(0, padded), tl.arange(0, value_padded)
    head = kv_head * group + row
    q = tl.load(
        q_nhd + sequence * q_stride_n + head[:, None] * q_stride_h + dim[None, :],
        mask=(row < group)[:, None] & (dim < width)[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, value_padded], tl.float32)
    for at in range(start, stop, keys):
        key = at + tl.arange(0, keys)
        there = key < stop
        slot = _slots(blocks_nb + sequence * table_stride, key, there, block_size)
        k = tl.load(
            k_bskd + slot[None, :] * k_stride_s + kv_head * k_stride_k + dim[:, None],
            mask=there[None, :] & (dim < width)[:, None], other=0.0,
        ).to(q.dtype)  # fmt: skip
        scores = _scores(q, k, scaling, softcap, has_cap, precision)
        scores = tl.where(there[None, :], scores, float("-inf"))
        weights, best, total, mixed = _online(scores, best, total, mixed)
        v = tl.load(
            v_bske + slot[:, None] * v_stride_s + kv_head * v_stride_k + value_dim[None, :],
            mask=there[:, None] & (value_dim < value_width)[None, :], other=0.0,
        ).to(q.dtype)  # fmt: skip
        mixed += tl.dot(weights.to(q.dtype), v, input_precision=precision)

    # an empty part has sum -inf and weighs nothing
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (sequence * heads + head) * splits + split
    tl.store(
        parts_nhpe + place[:, None] * value_width + value_dim[None, :], mixed,
        mask=(row < group)[:, None] & (value_dim < value_width)[None, :],
    )  # fmt: skip
    tl.store(sums_nhp + place, tl.where(total == 0.0, best, best + tl.log(tl.maximum(total, 1e-30))), mask=row < group)


@triton.jit(do_not_specialize=["splits"])
def _decode_join(
    parts_nhpe, sums_nhp, out_nhe, sinks_h, heads, splits, out_stride_n, out_stride_h,
    value_width: tl.constexpr, value_padded: tl.constexpr, most: tl.constexpr, joined: tl.constexpr,
    has_sinks: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = (sequence * heads + head) * splits
    split, value_dim = tl.arange(0, most), tl.arange(0, value_padded)
    sums = tl.load(sums_nhp + first + split, mask=split < splits, other=float("-inf"))
    best = tl.max(sums, 0)
    if has_sinks:
        sink = tl.load(sinks_h + head).to(tl.float32)
        best = tl.maximum(best, sink)
    total = tl.sum(tl.exp(sums - best), 0)
    if has_sinks:
        total += tl.exp(sink - best)
    mixed = tl.zeros([value_padded], tl.float32)
    for at in range(0, splits, joined):
        some = at + tl.arange(0, joined)
        there = some < splits
        weights = tl.exp(tl.load(sums_nhp + first + some, mask=there, other=float("-inf")) - best)
        parts = tl.load(
            parts_nhpe + (first + some)[:, None] * value_width + value_dim[None, :],
            mask=there[:, None] & (value_dim < value_width)[None, :], other=0.0,
        )  # fmt: skip
        mixed += tl.sum(parts * weights[:, None], 0)
    tl.store(
        out_nhe + sequence * out_stride_n + head * out_stride_h + value_dim,
        (mixed / total).to(out_nhe.dtype.element_ty), mask=value_dim < value_width,
    )  # fmt: skip


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    begins: torch.Tensor,
    counts: torch.Tensor,
    longest: int,
    form: Form,
    out: torch.Tensor,
    reaches: torch.Tensor | None = None,
) -> None:
    """Queries that follow each other at the end of their sequences, whose K and V are in the cache already.

    q [t, h, d] · keys [b, s, k, d] · values [b, s, k, e] · begins, counts [n] int32: sequence i has the queries
    [begins[i], begins[i] + counts[i]); `longest`: the largest count · out [t, h, e], written in place · reaches [t]
    int32: how many keys of its sequence each query sees, where some see keys behind them.
    """
    heads, width = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    value_width = values.shape[3]
    own = tile(max(_padded(width), _padded(value_width)), q.dtype)
    grid = (triton.cdiv(longest, own.queries), heads, len(begins))
    _check_slots(keys, values)
    _prefill[grid](
        q, keys, values, out, _sinks(form, q), tables.blocks, tables.lengths, begins, counts,
        begins if reaches is None else reaches,
        form.scaling, form.softcap or 1.0, tables.blocks.stride(0),
        *q.stride()[:2], *keys.stride()[1:3], *values.stride()[1:3], *out.stride()[:2],
        group=heads // kv_heads, block_size=block_size, width=width, value_width=value_width,
        padded=_padded(width), value_padded=_padded(value_width),
        window=form.window or 0, has_cap=form.softcap is not None, has_sinks=form.sinks is not None,
        has_reaches=reaches is not None, queries=own.queries, keys=own.keys, precision=_precision(q),
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    splits: int,
    form: Form,
    out: torch.Tensor,
) -> None:
    """One query per sequence, the last of its keys. q [n, h, d] → out [n, h, e]; `splits` from `splits_for`.

    Nothing here depends on values that only the device knows, so the call can be captured in a CUDA graph.
    """
    sequences, heads, width = q.shape
    block_size, kv_heads = keys.shape[1:3]
    value_width = values.shape[3]
    group = heads // kv_heads
    own = tile(max(_padded(width), _padded(value_width)), q.dtype)
    _check_slots(keys, values)
    assert 0 < splits <= _MOST_SPLITS
    parts = torch.empty(sequences, heads, splits, value_width, dtype=torch.float32, device=q.device)
    sums = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    _decode_parts[sequences, kv_heads, splits](
        q, keys, values, parts, sums, tables.blocks, tables.lengths,
        form.scaling, form.softcap or 1.0, tables.blocks.stride(0), heads, splits,
        *q.stride()[:2], *keys.stride()[1:3], *values.stride()[1:3],
        group=group, rows=max(_FEWEST_ROWS, triton.next_power_of_2(group)), block_size=block_size, width=width,
        value_width=value_width, padded=_padded(width), value_padded=_padded(value_width),
        window=form.window or 0, has_cap=form.softcap is not None, keys=own.keys, precision=_precision(q),
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    _decode_join[sequences, heads](
        parts, sums, out, _sinks(form, q), heads, splits, *out.stride()[:2],
        value_width=value_width, value_padded=_padded(value_width), most=_MOST_SPLITS, joined=_JOINED,
        has_sinks=form.sinks is not None,
    )  # fmt: skip


def splits_for(sequences: int, kv_heads: int, longest: int, processors: int) -> int:
    """How many programs share the keys of a sequence: enough to fill a device of so many multiprocessors twice, none
    with less than a worthwhile number of keys."""
    wanted = math.ceil(2 * processors / max(1, sequences * kv_heads))
    most = max(1, longest // _SPLIT_KEYS)
    return 1 << (max(1, min(wanted, most, _MOST_SPLITS)) - 1).bit_length()


def _check_slots(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Slots follow each other evenly, across blocks too (a view of wider slots will do)."""
    for cache in (keys, values):
        assert cache.stride(0) == cache.shape[1] * cache.stride(1), "the blocks of a cache are not evenly spaced"
        assert cache.stride(3) == 1, "the values of a head are not side by side"


def _padded(width: int) -> int:
    return max(_FEWEST_ROWS, triton.next_power_of_2(width))


def _precision(q: torch.Tensor) -> str:
    """Products in full float32 where the model is in float32: TF32 would change greedy tokens."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _sinks(form: Form, q: torch.Tensor) -> torch.Tensor:
    return q if form.sinks is None else form.sinks
