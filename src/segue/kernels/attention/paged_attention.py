"""Attention over a paged KV store, as an attention function of `transformers`.

`transformers` calls the function registered under a decoder's `attn_implementation` once per layer, with keyword
arguments of the decoder's forward passed through (`AttentionInterface`). A step's metadata travels as `paged`; the
mask function of the same name returns None, because block tables already separate the sequences of a flat batch.

A layer passes its options beyond plain causal attention as arguments: sliding windows, soft caps and sinks are
supported, anything else is refused. Options that a model expresses only in its masks (chunked attention, bidirectional
spans) are invisible here: `library_attention` lets the engine's check at load compare with the model's own masks.
Chunks come with the step, whose parts end at chunk borders (`segue.kernels.attention.paged_step`), and so do
bidirectional spans (`Part.bidirectional`), for a model known to have them. Layers that attend to images instead of
tokens use another step (`across`, `segue.kernels.attention.cross_attention`), and so do rows that follow a cached
prefix without being cached (`segue.kernels.attention.prefix_attention`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from segue.kernels.attention.calls import called
from segue.kernels.attention.cross_attention import CrossStep
from segue.kernels.attention.interface import AttentionOptions, AttentionWindow, Chunked
from segue.kernels.attention.invariant_attention import InvariantStep, invariant_attention
from segue.kernels.attention.paged_step import AttentionBackend, Chunk, HybridStep, PagedStep, additive
from segue.kernels.attention.prefix_attention import PrefixStep
from segue.kernels.attention.spans import SPAN_BYTES, Weighted, attend, attend_spans, slot_runs, together
from segue.kernels.kv.layout import LayerShape
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError

NAME = "segue_paged"
FLAT = "segue_flat"
"""The same attention without a mask function: the library then builds no masks, and does not look in the positions for
several sequences, which makes the host wait for the device."""
"""The `attn_implementation` a decoder is set to."""


class TorchAttention:
    """`scaled_dot_product_attention` over gathered K and V, or in place if that is faster
    (`segue.kernels.attention.spans`); K and V are never repeated for the query heads that share them."""

    recordable = False
    upcasts = True
    bidirectional = True
    page = 1

    def __init__(self, span_bytes: int = SPAN_BYTES) -> None:
        """`span_bytes`: gathering that each extra span of a decoding sequence must save to be read in place."""
        self._span_bytes = span_bytes

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: AttentionOptions
    ) -> torch.Tensor:
        step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        # a token sees its own chunk rounded as the cache stores it
        k, v = step.store.as_kept(k), step.store.as_kept(v)
        heads, tokens, _ = q.shape
        if not step.chunks and len(step.decodes) == 1:
            return self._decode(layer, q, step, 0, form).view(tokens, heads, v.shape[2])
        out = q.new_empty(tokens, heads, v.shape[2])
        for index, group in enumerate(step.decodes):
            out[group.begin : group.end] = self._decode(layer, q, step, index, form).view(-1, heads, v.shape[2])
        self.attend_chunks(layer, q, k, v, step, form, out)
        return out

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: PagedStep,
        form: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        """Sequences with several queries, written to their rows of `out` [tokens, heads, value_dim]. K and V have been
        written, and `k` and `v` are rounded as stored."""
        kv_heads = v.shape[0]
        for chunk in step.chunks:
            part = slice(chunk.begin, chunk.end)
            queries = q[:, part].unflatten(0, (kv_heads, -1))  # [kv_heads, heads per kv head, queries, dim]
            stop = chunk.start + chunk.end - chunk.begin
            causal = form.plain and (form.window is None or form.window >= stop) and chunk.part.causal
            if causal and chunk.start and _in_place(step.store, layer, form):
                own = attend(
                    queries, _spread(k[:, part], queries), _spread(v[:, part], queries), form.scaling, causal=True
                )
                mixed, _ = together(own, _before(layer, queries, step.store, chunk, form))
            else:
                causal = causal and chunk.start == 0
                keys, values = k[:, part], v[:, part]
                if chunk.start:
                    keys, values = (kv[0, :, :stop] for kv in step.store.read(layer, chunk.blocks, 1))
                mask = None if causal else chunk.mask(form.window, q.dtype)
                mixed = _attend(queries, _spread(keys, queries), _spread(values, queries), mask, form, causal=causal)
            out[part] = mixed.flatten(0, 1).transpose(0, 1)

    def _decode(self, layer: int, q: torch.Tensor, step: PagedStep, index: int, form: AttentionOptions) -> torch.Tensor:
        """[sequences, kv_heads, heads per kv head, dim]: the heads of a K/V head take the query axis."""
        group = step.decodes[index]
        store = step.store
        queries = q[:, group.begin : group.end].transpose(0, 1).unflatten(1, (store.layout.shapes[layer].kv_heads, -1))
        if _in_place(store, layer, form):
            spans = group.spans(form.window, store.block_size, self._span_bytes // store.token_bytes(layer))
            if spans is not None:
                return attend_spans(queries, *store.slots(layer), spans, form.scaling).contiguous()
        keys, values = store.read(layer, group.blocks, group.end - group.begin)
        mask = group.mask(form.window, q.dtype, store.block_size)
        return _attend(queries, keys, values, mask, form, causal=False, heads_as_queries=True).contiguous()


def _in_place(store: KVStore, layer: int, form: AttentionOptions) -> bool:
    """Whether attention over views of the store supports these options on this device."""
    return form.plain and store.in_place(layer)


def _before(layer: int, queries: torch.Tensor, store: KVStore, chunk: Chunk, form: AttentionOptions) -> Weighted:
    """All queries of a chunk [kv_heads, heads per kv head, queries, dim] over all tokens before the chunk."""
    runs = slot_runs(chunk.part.blocks, 0, chunk.start, store.block_size)
    if len(runs) == 1:
        [(begin, end)] = runs
        keys, values = (kv[begin:end].transpose(0, 1) for kv in store.slots(layer))
    else:
        keys, values = (kv[0, :, : chunk.start] for kv in store.read(layer, chunk.blocks, 1))
    return attend(queries, _spread(keys, queries), _spread(values, queries), form.scaling)


class ReferenceAttention:
    """Sequence by sequence, one dense softmax each: the reference that tests compare other backends with."""

    recordable = False
    upcasts = True
    bidirectional = True
    page = 1

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, form: AttentionOptions
    ) -> torch.Tensor:
        step.store.write(layer, step.slots, k.transpose(0, 1), v.transpose(0, 1))
        out, begin = [], 0
        for part in step.parts:
            end = begin + part.stop - part.start
            blocks = torch.tensor(part.blocks, device=q.device)
            keys, values = (kv[0, :, : part.stop] for kv in step.store.read(layer, blocks, 1))
            position = torch.arange(part.stop, device=q.device)
            query = position[part.start :, None]
            seen = position <= query
            for first, stop in part.bidirectional:
                seen = seen | ((first <= query) & (query < stop) & (first <= position) & (position < stop))
            if form.window is not None:
                seen = seen & (position > query - form.window)
            out.append(dense_attention(q[:, begin:end], keys, values, additive(seen, q.dtype), form))
            begin = end
        return torch.cat(out, dim=1).transpose(0, 1)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, form: AttentionOptions
) -> torch.Tensor:
    """q [heads, queries, dim], k and v [kv_heads, keys, dim], additive mask [queries, keys] → [heads, queries, dim]."""
    queries = q.unflatten(0, (k.shape[0], -1))
    return _scores_softmax(queries, _spread(k, queries), _spread(v, queries), mask, form, False).flatten(0, 1)


def _spread(kv: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """[kv_heads, keys, dim] expanded to every query head of its group, without a copy."""
    return kv[:, None].expand(-1, queries.shape[1], -1, -1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    form: AttentionOptions,
    *,
    causal: bool,
    heads_as_queries: bool = False,
) -> torch.Tensor:
    if form.plain:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=form.scaling)
    assert mask is not None
    return _scores_softmax(q, k, v, mask, form, heads_as_queries)


def _scores_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    form: AttentionOptions,
    heads_as_queries: bool,
) -> torch.Tensor:
    """Explicit attention with soft cap on the scores and sinks as one more column of the softmax."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * form.scaling
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    scores = scores + mask
    if form.sinks is not None:
        # [kv_heads, heads per kv head, 1]; heads are on the query axis in decoding, on the batch axes in prefill
        sinks = form.sinks.to(scores.dtype).view(k.shape[-3] if heads_as_queries else q.shape[0], -1, 1)
        sinks = sinks if heads_as_queries else sinks[..., None]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        return torch.matmul(scores.softmax(-1)[..., :-1], v)
    return torch.matmul(scores.softmax(-1), v)


# --- the hooks into transformers -------------------------------------------------------------------------------------

_HARMLESS = frozenset(
    (
        *("position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states", "output_router_logits"),
        "logits_to_keep",
    )
)
"""Keyword arguments of a decoder's forward that do not affect attention."""

TORCH: AttentionBackend = TorchAttention()


class MadeMask(NamedTuple):
    """A mask that a model built."""

    tensor: torch.Tensor
    function: Callable[..., Any]
    """`function(batch, head, query, key) -> seen`"""
    local: int | None
    """Its number of tokens, if it is a mask of windows or chunks."""

    @property
    def chunked(self) -> Chunked | None:
        """Its chunks, if it is a mask of chunked attention."""
        if self.local is None:
            return None
        zero, border = torch.tensor(0), torch.tensor(self.local)
        try:
            inside, across = self.function(zero, zero, border, border), self.function(zero, zero, border, border - 1)
        except IndexError:
            return None  # the mask reads data of this batch
        return Chunked(self.local) if inside and not across else None


@dataclass(slots=True)
class LibraryRecord:
    """The attention that a model requested while it ran with its own masks."""

    made: list[MadeMask] = field(default_factory=list)
    """Every mask that it built."""
    masks: list[Callable[..., Any]] = field(default_factory=list)
    """The mask functions of masks that a layer received (some models build masks that no layer uses)."""
    windows: dict[int, AttentionWindow] = field(default_factory=dict)
    """The window that each layer (`layer_idx`) passed to the attention function, or the chunks of its mask."""
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    """K/V shape of each layer."""


_library: ContextVar[LibraryRecord | None] = ContextVar("library_attention", default=None)


@contextmanager
def library_attention() -> Iterator[LibraryRecord]:
    """Within it, models set to `segue_paged` run whole sequences with the masks that the library builds for them."""
    record = LibraryRecord()
    token = _library.set(record)
    try:
        yield record
    finally:
        _library.reset(token)


@torch.compiler.disable  # it depends on the step's block tables: compiled code would be rebuilt for each
def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: PagedStep | HybridStep | InvariantStep | PrefixStep | None = None,
    across: CrossStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that `transformers` calls: query [1, heads, tokens, dim] → ([1, tokens, heads, dim], None).

    Raises `ConfigError` for anything unsupported.
    """
    if dropout or is_causal is False:
        raise ConfigError(f"paged attention does not support dropout={dropout}, is_causal={is_causal}")
    for name in others.keys() - _HARMLESS:
        if others[name] is not None and others[name] is not False:
            raise ConfigError(f"paged attention does not support the argument {name!r}, so it cannot serve this model")
    form = AttentionOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    layer, paged = called(module, paged)
    if across is not None and layer in across.layers:
        return across.attend(layer, query[0], form.scaling)[None], None
    if paged is None:
        return _under_library_mask(layer, query, key, value, attention_mask, form), None
    if attention_mask is not None:
        raise ConfigError("paged attention takes no mask: block tables separate the sequences")
    if isinstance(paged, InvariantStep):
        return invariant_attention(layer, query[0], key[0], value[0], paged, form)[None], None
    if isinstance(paged, PrefixStep):
        return paged.attend(layer, query[0], key[0], value[0], form)[None], None
    step = paged.of(layer)
    backend = step.store.backend or TORCH
    return backend.attend(layer, query[0], key[0], value[0], step, form)[None], None


def _under_library_mask(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    form: AttentionOptions,
) -> torch.Tensor:
    record = _library.get()
    if record is None or mask is None:
        raise ConfigError("paged attention needs the keyword argument `paged`: the model does not pass it through")
    used = [made for made in record.made if made.tensor is mask]
    record.masks += [made.function for made in used or record.made]  # a derived mask may contain any of them
    chunks = next((made.chunked for made in used if form.window is None and made.chunked), None)
    record.windows[layer] = form.window if chunks is None else chunks
    record.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
    wide = torch.promote_types(query.dtype, torch.float32)  # the kernels' scores and softmax have 32 bits, too
    q, k, v = (part[0].to(wide) for part in (query, key, value))
    mixed = dense_attention(q, k, v, additive(mask[0, 0], q.dtype), form).to(query.dtype)
    return mixed.transpose(0, 1).contiguous()[None]  # some models take views of it


def paged_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **others: Any
) -> torch.Tensor | None:
    """No mask for a flat batch; within `library_attention` the library's own, boolean and never skipped."""
    record = _library.get()
    if record is None:
        return None
    others["allow_is_causal_skip"] = False
    mask = sdpa_mask(mask_function=mask_function, local_size=local_size, **others)
    if mask is None:  # the library omits masks that may be skipped, and those of full attention
        raise ConfigError(
            "this model cannot be served: each of its tokens attends to all others, so it is an encoder (its config "
            "does not say is_decoder)",
            field="architectures",
        )
    record.made.append(MadeMask(mask, mask_function, local_size))
    return mask


AttentionInterface.register(NAME, paged_attention)
AttentionInterface.register(FLAT, paged_attention)
AttentionMaskInterface.register(NAME, paged_mask)
