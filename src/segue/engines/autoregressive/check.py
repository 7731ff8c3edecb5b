"""At load: does the model give in a flat, paged batch what it gives one sequence at a time under its own masks?

A mask function that returns None is right for plain causal attention, and for what layers pass on as arguments
(sliding windows, soft caps, sinks). A model that says more in its masks would be silently wrong: it is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter, FlatBatch
from segue.kernels.paged_attention import LibraryRecord, library_attention
from segue.kernels.paged_step import AttentionBackend, PagedStep, paged_step
from segue.kernels.part import Part, step_order
from segue.messages.errors import ConfigError

_LENGTHS = (21, 40)
_SIZE = 8  # tokens per block
_BLOCKS = (tuple(range(3)), tuple(range(3, 8)))
# (start, stop) of both sequences per step: whole; then chunks, a decode beside a chunk, and a decode of each
_WHOLE = (((0, 21), (0, 40)),)
_PIECES = (((0, 5), (0, 30)), ((5, 20), (30, 31)), ((20, 21), (31, 39)), (None, (39, 40)))
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
"""Largest difference over largest value (a mask that is wrong gives about 1)."""
_ROUGH = 0.1
"""For 16-bit types."""
_COARSE = 0.5
"""For decoders that round activations to 8 bits, on a scale that is one for all rows of a step: 24 layers of random
weights give 0.24."""


def check_attention(adapter: AutoregressiveAdapter, backend: AttentionBackend | None = None) -> None:
    """Raise `ConfigError` where two short sequences differ flat and apart, or a mask is one we cannot do."""
    limit = min(adapter.max_model_len, max(_LENGTHS))
    if limit < max(_LENGTHS):
        raise ConfigError(f"max_model_len is {adapter.max_model_len}; it must be at least {max(_LENGTHS)}")
    with torch.inference_mode():
        sequences = [_ids(length, adapter) for length in _LENGTHS]
        with library_attention() as record:
            apart = [_forward(adapter, [(ids, 0, len(ids))], None) for ids in sequences]
        _check_masks(record, adapter.max_model_len)
        _check_windows(record, adapter.kv.windows)
        for name, steps in (("flat", _WHOLE), ("in pieces", _PIECES)):
            flat = _run_flat(adapter, backend, sequences, steps)
            for ours, theirs in zip(flat, apart, strict=True):
                _compare(name, ours, theirs, coarse=adapter.kv.coarse)


def check_mutual_served(kernel: str, backend: AttentionBackend | None, *, deterministic: bool) -> None:
    """Raise `ConfigError` where the deployment asks for what cannot be done with tokens that see each other."""
    both = "tokens of this model's media see each other in both directions, which"
    if deterministic:
        raise ConfigError(f"{both} deterministic cannot do: its tiles are causal", field="deterministic")
    if backend is not None and not backend.mutual:
        raise ConfigError(f"{both} attention {kernel!r} cannot do; use triton, flex or torch", field="attention")


def _ids(length: int, adapter: AutoregressiveAdapter) -> torch.Tensor:
    return (torch.arange(length, device=adapter.device) * 7919 + length) % adapter.vocab_size


def _forward(
    adapter: AutoregressiveAdapter, parts: list[tuple[torch.Tensor, int, int]], paged: PagedStep | None
) -> torch.Tensor:
    ids = torch.cat([tokens[start:stop] for tokens, start, stop in parts])
    places = torch.cat([torch.arange(start, stop, device=adapter.device) for _, start, stop in parts])
    positions = places.expand(adapter.axes, -1)
    batch = FlatBatch(ids, None, positions, paged, [(None, start, stop) for _, start, stop in parts])
    hidden, _ = adapter.forward(adapter.embed(ids, None), batch)
    return hidden


def _run_flat(
    adapter: AutoregressiveAdapter,
    backend: AttentionBackend | None,
    sequences: list[torch.Tensor],
    steps: tuple[tuple[tuple[int, int] | None, ...], ...],
) -> list[torch.Tensor]:
    # no sequence outgrows a window here, as far as the layout goes: all layers in one group, nothing is given back
    layout = adapter.kv.layout(max_model_len=1)
    store = adapter.kv.store(
        layout,
        num_blocks=sum(map(len, _BLOCKS)),
        block_size=_SIZE,
        dtype=adapter.kv.dtype,
        device=adapter.device,
        backend=backend,
    )
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        parts = [(which, Part(_BLOCKS[which], *span)) for which, span in enumerate(step) if span is not None]
        parts.sort(key=lambda entry: step_order(entry[1]))
        paged = paged_step(store, [part for _, part in parts])
        hidden = _forward(adapter, [(sequences[which], part.start, part.stop) for which, part in parts], paged)
        for (which, _), piece in zip(parts, hidden.split([part.stop - part.start for _, part in parts]), strict=True):
            pieces[which].append(piece)
    return [torch.cat(piece) for piece in pieces]


def _compare(name: str, ours: torch.Tensor, theirs: torch.Tensor, *, coarse: bool) -> None:
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    tolerance = _COARSE if coarse else _TOLERANCE.get(theirs.dtype, _ROUGH)
    if not error <= tolerance:
        raise ConfigError(
            f"this model cannot be served: a sequence of {len(theirs)} tokens run {name} differs from the same run "
            f"under the model's own masks by {error:.1e} (at most {tolerance:.0e}); its attention is not plain causal"
        )


def _check_masks(record: LibraryRecord, max_model_len: int) -> None:
    """Masks at the far end of the context, which short sequences do not reach."""
    for mask in record.masks:
        if not any(_is_causal(mask, window, max_model_len) for window in {None, *record.windows.values()}):
            raise ConfigError(
                "this model cannot be served: one of its masks is neither causal nor one of the sliding windows its "
                f"layers ask for ({sorted({window for window in record.windows.values() if window}) or 'none'})"
            )


def _check_windows(record: LibraryRecord, promised: Seq[int | None]) -> None:
    """A layer that looks back further than the KV spec says would read blocks that were given back."""
    for layer, kept in enumerate(promised):
        asked = record.windows.get(layer)
        if kept is not None and (asked is None or asked > kept):
            raise ConfigError(
                f"this model cannot be served: its KV spec says that layer {layer} has a window of {kept}, but the "
                f"layer itself asks for {'no window' if asked is None else asked}"
            )


def _is_causal(mask: Callable[..., Any], window: int | None, max_model_len: int) -> bool:
    """Whether sampled entries are those of a causal mask with this window."""
    zero = torch.tensor(0)
    for query in {max_model_len - 1, max_model_len // 2, max_model_len // 3}:
        reach = query if window is None else min(window, query)
        for key in {0, 1, query // 2, query - reach, query - reach + 1, query - 1, query, query + 1}:
            expected = key <= query and (window is None or key > query - window)
            try:
                seen = bool(mask(zero, zero, torch.tensor(query), torch.tensor(key)))
            except IndexError:
                return False  # a mask read off this batch: positions alone do not say it
            if seen != expected:
                return False
    return True
