"""Attention over a paged KV cache as Triton kernels: chunks of queries (prefill), and single queries (decode).

Prefill is FlashAttention-2's forward pass (Dao, 2023, §3.1) with K and V read through block tables. Decode splits the
keys of long sequences over several programs, because one query alone does not fill a GPU and a long sequence must not
outlast a batch of short ones, and combines the splits by their log-sum-exp (Flash-Decoding: Dao et al., 2023); the
query heads that share a K/V head are the rows of its GEMMs, so that K and V are read once.

Legend: n sequences, t tokens, h query heads, k K/V heads, d head width, e value width, b blocks, s block size,
p splits.
Every function here has a plain torch counterpart in `segue.kernels.attention.paged_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from segue.kernels.attention.interface import AttentionOptions

_FEWEST_ROWS = 16  # smallest dimension of a Triton GEMM
_SPLIT_KEYS = 256
"""Fewest keys for which a program of the split decode pays off."""
FILLED = 2
"""A decode splits keys until its programs fill a device's multiprocessors this many times."""
_JOINED = 16
"""Splits of a sequence that are combined in one iteration."""
_COUNTED = 128
"""Sequences whose splits are counted in one iteration."""

# Arguments that change between steps must not be specialised: Triton compiles another kernel for an integer that is 1
# or a multiple of 16, and for a pointer to the middle of a tensor. Compiling takes seconds while requests wait.
_TABLES = ("blocks_nb", "lengths_n", "begins_n", "counts_n", "reaches_t", "firsts_n", "splits_3p")


@dataclass(frozen=True, slots=True)
class Tile:
    """Work of one program per iteration."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Pipeline stages of the loop over keys: later iterations are loaded ahead, into shared memory."""


def prefill_tile(width: int, dtype: torch.dtype) -> Tile:
    """For heads of `width` elements, padded. With these sizes no kernel needs more than the 227 KiB of shared memory
    and the 255 registers per thread of a Hopper (read from the compiler's output)."""
    if dtype.itemsize > 2:  # GEMMs without tensor cores: small ones, or registers run out
        return Tile(32, 32, 4 if width <= 128 else 8, 2 if width <= 256 else 1)
    if width <= 128:
        return Tile(64, 64, 4, 3)
    return Tile(64, 32, 8, 2)


def decode_tile(width: int, dtype: torch.dtype) -> Tile:
    """For single queries, which are bound by memory and not by GEMMs, within the same limits.

    The addresses of K and V are loaded too, from the block table, and the compiler gives each load of such a chain an
    equal share of the stages: with 3 or 4 the kernel waits for every load that it has started; with 5 the next tile is
    loaded while one is computed.
    """
    row_bytes = width * dtype.itemsize
    keys = 64 if row_bytes <= 256 else 32 if row_bytes <= 1024 else 16
    return Tile(_FEWEST_ROWS, keys, 4 if row_bytes <= 256 else 8, 5)


@dataclass(frozen=True, slots=True)
class Tables:
    """Locations of the K and V of a call's sequences. All int32, on the device."""

    blocks: torch.Tensor
    """[n, most]: block tables; entries after a sequence's last block are not read."""
    lengths: torch.Tensor
    """[n] number of keys of each sequence, including those of its own queries."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Keys that each program of a decode reads: a sequence has one split or several. All int32, on the device."""

    table: torch.Tensor
    """[3, p]: the sequence of each split, its first key, and the key after its last. The rest of p is unused."""
    firsts: torch.Tensor
    """[n + 1]: the first split of each sequence; the last entry is the number of splits."""
    tile: Tile
    """Of the programs that read them."""


@triton.jit
def _capped(scores, softcap):
    """`softcap * tanh(scores / softcap)`, with tanh written by the logistic function, which every backend has."""
    return softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)


@triton.jit
def _slots(blocks_b, key, there, block_size: tl.constexpr):
    """Slots of the keys of one sequence in the cache; `blocks_b`: its block table."""
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
    """One step of the online softmax: (weights, new best, new total, `mixed` rescaled to the new best)."""
    new = tl.maximum(best, tl.max(scores, 1))
    # a row that has seen no key has best = -inf: -inf - -inf would be NaN
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

    # padding rows after the last query may have seen no key
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_the + (begin + row)[:, None] * out_stride_t + head * out_stride_h + value_dim[None, :],
        mixed.to(out_the.dtype.element_ty),
        mask=inside[:, None] & (value_dim < value_width)[None, :],
    )


@triton.jit
def _seen(lengths_n, n, sequences, window):
    """How many keys the queries of these sequences see; 0 after the last sequence."""
    length = tl.load(lengths_n + n, mask=n < sequences, other=0)
    return tl.where(window > 0, tl.minimum(length, window), length)


@triton.jit(
    do_not_specialize=["sequences", "most", "window"],
    do_not_specialize_on_alignment=["lengths_n", "firsts_n", "splits_3p"],
)
def _split(
    lengths_n, firsts_n, splits_3p, sequences, most, window,
    fewest: tl.constexpr, keys: tl.constexpr, counted: tl.constexpr,
):  # fmt: skip
    """One program per sequence. No split has more keys than the `most - sequences`th part of all, so at most `most`
    splits are made; the splits of a sequence have equal length, in whole tiles."""
    own = tl.program_id(0)
    total = 0
    for at in range(0, sequences, counted):
        total += tl.sum(_seen(lengths_n, at + tl.arange(0, counted), sequences, window), 0)
    share = tl.cdiv(tl.maximum(tl.cdiv(total, most - sequences), fewest), keys) * keys
    first = 0
    for at in range(0, own, counted):
        n = at + tl.arange(0, counted)
        first += tl.sum(tl.where(n < own, tl.cdiv(_seen(lengths_n, n, sequences, window), share), 0), 0)
    length = tl.load(lengths_n + own)
    seen = _seen(lengths_n, own, sequences, window)
    count = tl.cdiv(seen, share)
    each = tl.cdiv(tl.cdiv(seen, count), keys) * keys
    tl.store(firsts_n + own, first)
    if own == sequences - 1:
        tl.store(firsts_n + sequences, first + count)
    for at in range(0, count, counted):
        split = at + tl.arange(0, counted)
        there = split < count
        start = length - seen + split * each
        tl.store(splits_3p + first + split, own, mask=there)
        tl.store(splits_3p + most + first + split, start, mask=there)
        tl.store(splits_3p + 2 * most + first + split, tl.minimum(start + each, length), mask=there)


@triton.jit(do_not_specialize=["table_stride", "sequences", "most"], do_not_specialize_on_alignment=_TABLES)
def _decode_splits(
    q_nhd, k_bskd, v_bske, mixed_phe, sums_ph, blocks_nb, splits_3p, firsts_n,
    scaling, softcap, table_stride, sequences, most, heads,
    q_stride_n, q_stride_h, k_stride_s, k_stride_k, v_stride_s, v_stride_k,
    group: tl.constexpr, rows: tl.constexpr, block_size: tl.constexpr, width: tl.constexpr,
    value_width: tl.constexpr, padded: tl.constexpr, value_padded: tl.constexpr,
    has_cap: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    split, kv_head = tl.program_id(0), tl.program_id(1)
    if split >= tl.load(firsts_n + sequences):
        return
    sequence = tl.load(splits_3p + split)
    start = tl.load(splits_3p + most + split)
    stop = tl.load(splits_3p + 2 * most + split)

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

    mixed = mixed / total[:, None]
    place = split * heads + head
    tl.store(
        mixed_phe + place[:, None] * value_width + value_dim[None, :], mixed,
        mask=(row < group)[:, None] & (value_dim < value_width)[None, :],
    )  # fmt: skip
    tl.store(sums_ph + place, best + tl.log(total), mask=row < group)


@triton.jit(do_not_specialize_on_alignment=["firsts_n"])
def _decode_join(
    mixed_phe, sums_ph, out_nhe, sinks_h, firsts_n, heads, out_stride_n, out_stride_h,
    value_width: tl.constexpr, value_padded: tl.constexpr, joined: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(firsts_n + sequence), tl.load(firsts_n + sequence + 1)
    value_dim = tl.arange(0, value_padded)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if has_sinks:
        best = tl.load(sinks_h + head).to(tl.float32)
        total = tl.full([], 1.0, tl.float32)
    mixed = tl.zeros([value_padded], tl.float32)
    for at in range(first, stop, joined):
        split = at + tl.arange(0, joined)
        there = split < stop
        sums = tl.load(sums_ph + split * heads + head, mask=there, other=float("-inf"))
        new = tl.maximum(best, tl.max(sums, 0))
        weights, keep = tl.exp(sums - new), tl.exp(best - new)
        parts = tl.load(
            mixed_phe + (split * heads + head)[:, None] * value_width + value_dim[None, :],
            mask=there[:, None] & (value_dim < value_width)[None, :], other=0.0,
        )  # fmt: skip
        mixed = mixed * keep + tl.sum(parts * weights[:, None], 0)
        total = total * keep + tl.sum(weights, 0)
        best = new
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
    form: AttentionOptions,
    out: torch.Tensor,
    reaches: torch.Tensor | None = None,
) -> None:
    """Consecutive queries at the end of their sequences, whose K and V are in the cache already.

    q [t, h, d] · keys [b, s, k, d] · values [b, s, k, e] · begins, counts [n] int32: sequence i has the queries
    [begins[i], begins[i] + counts[i]); `longest`: the largest count · out [t, h, e], written in place · reaches [t]
    int32: how many keys of its sequence each query sees, if some see keys after them.
    """
    heads, width = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    value_width = values.shape[3]
    q = _side_by_side(q)
    own = prefill_tile(_padded(max(width, value_width)), q.dtype)
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


def split_keys(
    lengths: torch.Tensor,
    longest: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    processors: int,
    window: int | None = None,
    tile: Tile | None = None,
    filled: int = FILLED,
) -> Splits:
    """Plan the keys that each program of `decode` reads, for lengths [n] int32, each at most `longest`.

    Keys are split until the programs of all K/V heads fill a device with `processors` multiprocessors, whatever the
    number of sequences: the longest are split most. `width`: of a head or its values, the larger. `tile`: in place of
    `decode_tile`'s; `filled`: in place of `FILLED`. The host reads nothing from the device, and shapes depend on n and
    `longest` alone, so the call can be captured in a CUDA graph.
    """
    sequences = len(lengths)
    tile = tile or decode_tile(_padded(width), dtype)
    most = sequences + max(1, min(math.ceil(filled * processors / kv_heads), sequences * longest // _SPLIT_KEYS))
    splits = torch.empty(3, most, dtype=torch.int32, device=lengths.device)
    firsts = torch.empty(sequences + 1, dtype=torch.int32, device=lengths.device)
    _split[(sequences,)](
        lengths, firsts, splits, sequences, most, window or 0,
        fewest=_SPLIT_KEYS, keys=tile.keys, counted=_COUNTED,
    )  # fmt: skip
    return Splits(splits, firsts, tile)


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    splits: Splits,
    form: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """One query per sequence, the last of its keys. q [n, h, d] → out [n, h, e]; `blocks` as in `Tables`; `splits` from
    `split_keys` with the same window.

    Nothing here depends on values that only the device knows, so the call can be captured in a CUDA graph.
    """
    sequences, heads, width = q.shape
    block_size, kv_heads = keys.shape[1:3]
    value_width = values.shape[3]
    group = heads // kv_heads
    most = splits.table.shape[1]
    q = _side_by_side(q)
    _check_slots(keys, values)
    mixed = torch.empty(most, heads, value_width, dtype=torch.float32, device=q.device)
    sums = torch.empty(most, heads, dtype=torch.float32, device=q.device)
    _decode_splits[most, kv_heads](
        q, keys, values, mixed, sums, blocks, splits.table, splits.firsts,
        form.scaling, form.softcap or 1.0, blocks.stride(0), sequences, most, heads,
        *q.stride()[:2], *keys.stride()[1:3], *values.stride()[1:3],
        group=group, rows=max(_FEWEST_ROWS, triton.next_power_of_2(group)), block_size=block_size, width=width,
        value_width=value_width, padded=_padded(width), value_padded=_padded(value_width),
        has_cap=form.softcap is not None, keys=splits.tile.keys, precision=_precision(q),
        num_warps=splits.tile.warps, num_stages=splits.tile.stages,
    )  # fmt: skip
    _decode_join[sequences, heads](
        mixed, sums, out, _sinks(form, q), splits.firsts, heads, *out.stride()[:2],
        value_width=value_width, value_padded=_padded(value_width), joined=_JOINED,
        has_sinks=form.sinks is not None,
    )  # fmt: skip


def _side_by_side(q: torch.Tensor) -> torch.Tensor:
    """Make a head's elements contiguous, as the kernels need; some models pass a strided view."""
    return q if q.stride(-1) == 1 else q.contiguous()


def _check_slots(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Check that slots are evenly spaced, across blocks too (a view of wider slots is allowed)."""
    for cache in (keys, values):
        assert cache.stride(0) == cache.shape[1] * cache.stride(1), "the blocks of a cache are not evenly spaced"
        assert cache.stride(3) == 1, "the values of a head are not contiguous"


def _padded(width: int) -> int:
    return max(_FEWEST_ROWS, triton.next_power_of_2(width))


def _precision(q: torch.Tensor) -> str:
    """GEMMs in full float32 for float32 models: TF32 would change greedy tokens."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _sinks(form: AttentionOptions, q: torch.Tensor) -> torch.Tensor:
    return q if form.sinks is None else form.sinks
