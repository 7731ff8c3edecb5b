"""Batch invariance: bit-identical logits, whatever else is in the batch and however a prompt is chunked.

Shape changes bits: a GEMM over 3 rows takes another code path than one over 4, a padded group sums in another order
than a single sequence, and the last elements of a buffer are computed by scalar instead of vector code. So the decoder
only ever runs on exactly 16 rows, padded at the end; attention is `invariant_attention`; the head and the embedding run
on 16 rows as well. Any remaining dependence on neighbours (experts, whose rows the router gathers; a kernel that treats
rows differently) shows in `check_invariant`, and the model is refused.

Optional reading: a model is wrapped in `InvariantModel` if its deployment asks for it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from segue.engines.autoregressive.contract import AutoregressiveModel, Draws, FlatBatch, KVSpec, YieldsRows
from segue.engines.autoregressive.wrapped import Wrapped
from segue.kernels.attention.interface import Chunked
from segue.kernels.attention.invariant_attention import invariant_step
from segue.kernels.attention.paged_step import PagedStep, Part, paged_step
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError

ROWS = 16
"""Rows of every call of the model."""


def whole_kv(spec: KVSpec) -> KVSpec:
    """The spec without windows, so that no blocks are freed: tiles lie at absolute positions. Raises `ConfigError`."""
    if any(isinstance(back, Chunked) for back in spec.windows):
        raise ConfigError(
            "deterministic: layers of this model attend in chunks, unsupported by its tiles", field="deterministic"
        )
    return replace(spec, windows=())


class InvariantModel(Wrapped):
    """An `AutoregressiveModel` that runs the network of another one on 16 rows at a time."""

    def __init__(self, inner: AutoregressiveModel) -> None:
        super().__init__(inner)
        self.kv = whole_kv(inner.kv)

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] ids, [n, width] rows → [n, hidden]."""
        pieces = []
        for begin in range(0, len(token_ids), ROWS):
            end = min(begin + ROWS, len(token_ids))
            rows = None if conditioning is None else _padded(conditioning[begin:end], 0)
            pieces.append(self.inner.embed(_padded(token_ids[begin:end], 0), rows)[: end - begin])
        return torch.cat(pieces) if pieces else self.inner.embed(token_ids, conditioning)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        ends = [(begin, min(begin + ROWS, len(hidden))) for begin in range(0, len(hidden), ROWS)]
        return torch.cat([self.inner.logits(_padded(hidden[begin:end], 0))[: end - begin] for begin, end in ends])

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, hidden], [n] codes 0 → [n, groups - 1], for an inner stage model that yields rows of codes."""
        assert isinstance(self.inner, YieldsRows)
        pieces, finite = [], []
        for begin in range(0, len(ids), ROWS):
            end = min(begin + ROWS, len(ids))
            own = (draws.numbers, draws.greedy, draws.filters)
            tile = Draws(*(_padded(tensor[begin:end], 0) for tensor in own))
            tile.recent = None if draws.recent is None else _padded(draws.recent[begin:end], 0)
            pieces.append(self.inner.advance(_padded(hidden[begin:end], 0), _padded(ids[begin:end], 0), tile))
            finite.append(torch.ones_like(tile.greedy) if tile.finite is None else tile.finite)
        draws.finite = torch.cat(finite)[: len(ids)]  # only the last tile is padded
        return torch.cat(pieces)[: len(ids)]

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, hidden] → (final hidden states, captured rows or None), tile by tile: each tile sees the cache
        entries of those before it."""
        step = batch.attention
        assert isinstance(step, PagedStep), "the check under the library's own masks runs on the stage model itself"
        states, rows = [], []
        for begin in range(0, len(embeds), ROWS):
            end = min(begin + ROWS, len(embeds))
            tile = _tile(batch, step, begin, end)
            hidden, captured = self.inner.forward(_padded(embeds[begin:end], 0), tile)
            states.append(hidden[: end - begin])
            if captured is not None:
                rows.append(captured[: end - begin])
        return torch.cat(states), torch.cat(rows) if rows else None


def _tile(batch: FlatBatch, step: PagedStep, begin: int, end: int) -> FlatBatch:
    """The flat tokens [begin, end) of a batch, with padding."""
    parts: list[Part] = []
    prompts = []
    at = 0
    for part in step.parts:
        start, stop = max(begin - at, 0) + part.start, min(end - at, part.stop - part.start) + part.start
        if start < stop:
            parts.append(Part(part.blocks, start, stop))
        at += part.stop - part.start
    at = 0
    for prompt, first, last in batch.prompts:
        start, stop = max(begin - at, 0) + first, min(end - at, last - first) + first
        if start < stop:
            prompts.append((prompt, start, stop))
        at += last - first
    if end - begin < ROWS:
        prompts.append((None, 0, ROWS - (end - begin)))
    return FlatBatch(
        _padded(batch.token_ids[begin:end], 0),
        None if batch.embeds is None else _padded(batch.embeds[begin:end], 0),
        _padded(batch.positions[:, begin:end], 1),
        invariant_step(step.store, parts),
        prompts,
    )


def _padded(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """A copy with 16 entries along `axis`, zero-padded; always newly allocated, so that its alignment is the same."""
    shape = list(tensor.shape)
    shape[axis] = ROWS
    padded = tensor.new_zeros(shape)
    padded.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return padded


# --- the check at load -----------------------------------------------------------------------------------------------

_LENGTH = 37
_BLOCK = 8
_BLOCKS = -(-_LENGTH // _BLOCK)


def check_invariant(model: InvariantModel) -> None:
    """Raise `ConfigError` for a model whose hidden states or logits change in any bit with the neighbours, the position
    in the batch, or the chunking of the prompt."""
    probe = _ids(model, 1)
    with torch.inference_mode():
        alone = _run(model, probe, [], [(0, _LENGTH)])
        logits = model.logits(alone[-3:])
        trials: list[tuple[str, list[torch.Tensor], list[tuple[int, int]]]] = [
            ("in pieces", [], [(0, 5), (5, 21), (21, 36), (36, 37)]),
            ("behind a cached prefix", [], [(0, 16), (16, 37)]),
            ("with copies of itself", [probe] * 4, [(0, 30), (30, 37)]),
        ]
        # every row of the tile, once each
        trials += [(f"behind {rows} others", [_ids(model, 2 + rows)[:rows]], [(0, ROWS)]) for rows in range(1, ROWS)]
        for name, others, spans in trials:
            found = _run(model, probe, others, spans)
            what, ours, theirs = "states", found, alone[: len(found)]
            if torch.equal(ours, theirs) and len(found) == _LENGTH:
                # the head's rows, at other rows of its tile
                what, ours, theirs = "logits", model.logits(found[-5:])[-3:], logits
            if not torch.equal(ours, theirs):
                apart = float((ours - theirs).abs().max() / theirs.abs().max())
                raise ConfigError(
                    f"deterministic is not possible for this model: the {what} of a sequence run {name} differ from "
                    f"those of the same sequence alone by {apart:.1e} of the largest value; no difference is allowed. "
                    "A mixture of experts may differ, as its GEMMs depend on the neighbours",
                    field="deterministic",
                )


def _ids(model: InvariantModel, seed: int) -> torch.Tensor:
    return (torch.arange(_LENGTH, device=model.device) * 7919 + 104729 * seed) % model.vocab_size


def _run(
    model: InvariantModel, probe: torch.Tensor, others: list[torch.Tensor], spans: list[tuple[int, int]]
) -> torch.Tensor:
    """[tokens, hidden] of `probe`, computed span by span, each after the same span of `others`."""
    store = KVStore(
        model.kv.layout(model.max_model_len),
        num_blocks=(1 + len(others)) * _BLOCKS,
        block_size=_BLOCK,
        dtype=model.kv.dtype,
        device=model.device,
    )
    sequences = [*others, probe]
    found = []
    for start, stop in spans:
        parts = []
        for index, ids in enumerate(sequences):
            part = Part(range(index * _BLOCKS, (index + 1) * _BLOCKS), start, min(stop, len(ids)))
            if part.start < part.stop:
                parts.append((ids, part))
        # a step has its single tokens first; the probe is the last sequence of its length
        parts.sort(key=lambda entry: entry[1].stop - entry[1].start > 1)
        at = next(i for i in reversed(range(len(parts))) if parts[i][1].blocks[0] == len(others) * _BLOCKS)
        begin = sum(part.stop - part.start for _, part in parts[:at])
        ids = torch.cat([ids[part.start : part.stop] for ids, part in parts])
        places = torch.cat([torch.arange(part.start, part.stop, device=model.device) for _, part in parts])
        step = paged_step(store, [part for _, part in parts])
        batch = FlatBatch(
            ids, None, places.expand(model.axes, -1), step, [(None, part.start, part.stop) for _, part in parts]
        )
        hidden, _ = model.forward(model.embed(ids, None), batch)
        found.append(hidden[begin : begin + stop - start])
    return torch.cat(found)
