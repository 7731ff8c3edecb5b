"""Checks at load that the model computes the same in a flat, paged batch as for single sequences under its own masks.

A mask function that returns None is correct for plain causal attention, for features that layers pass as arguments
(sliding windows, soft caps, sinks), and for chunks, at whose borders the engine splits. A model whose masks express
anything else would be silently wrong, so it is refused here.

Optional reading: called once, at load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from typing import Any

import torch

from segue.engines.autoregressive.contract import AutoregressiveModel, FlatBatch, KVSpec, embedded
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.kernels.attention.interface import AttentionWindow, Chunked, check_chunks, first_seen
from segue.kernels.attention.paged_attention import LibraryRecord, library_attention
from segue.kernels.attention.paged_step import (
    AttentionBackend,
    HybridStep,
    PagedStep,
    Part,
    joined,
    paged_step,
    step_order,
    within_chunks,
)
from segue.kernels.kv.states import StateLayout, StateStep, StateStore, Stretch, state_step
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError

_LENGTHS = (21, 40)
_SIZE = 8
"""Tokens per block, for backends that accept blocks this small."""
# (start, stop) of both sequences per step: whole; then chunks, a decode with a chunk, decodes of both at different
# positions, and a chunk after that
_WHOLE = (((0, 21), (0, 40)),)
_PIECES = (((0, 5), (0, 30)), ((5, 20), (30, 31)), ((20, 21), (31, 32)), (None, (32, 40)))
_ENTIRE = (((0, 20), (0, 38)), ((20, 21), (38, 39)), (None, (39, 40)))
"""For states that do not continue: only the first tokens of a sequence can be computed together."""
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
"""Largest difference over largest value (a wrong mask gives about 1)."""
_ROUGH = 0.1
"""For 16-bit types; a fifth of the tokens may differ by more, since rounding may send a token to other experts."""
_COARSE = 0.5
"""For decoders that round activations to 8 bits with one scale for all rows of a step: 24 layers of random weights
give 0.24."""


def check_attention(model: AutoregressiveModel, backend: AttentionBackend | None = None) -> None:
    """Raise `ConfigError` if two short sequences differ between a flat batch and single runs, or a mask is unknown."""
    limit = min(model.max_model_len, max(_LENGTHS))
    if limit < max(_LENGTHS):
        raise ConfigError(f"max_model_len is {model.max_model_len}; it must be at least {max(_LENGTHS)}")
    with torch.inference_mode():
        sequences = [_ids(length, model) for length in _LENGTHS]
        with library_attention() as record:
            apart = [_forward(model, [(ids, 0, len(ids))], None) for ids in sequences]
        _check_masks(record, model.max_model_len)
        _check_windows(record, model.kv)
        kept = model.kv.states
        pieces = _PIECES if kept is None or kept.continues else _ENTIRE
        for name, steps in (("flat", _WHOLE), ("in pieces", pieces)):
            flat = _run_flat(model, backend, sequences, steps)
            for ours, theirs in zip(flat, apart, strict=True):
                _compare(name, ours, theirs, model.kv)


def check_bidirectional_served(
    kernel: str, backend: AttentionBackend | None, windows: Seq[AttentionWindow], *, deterministic: bool
) -> None:
    """Raise `ConfigError` if the deployment asks for an option that does not support bidirectional spans."""
    if any(isinstance(back, Chunked) for back in windows):
        raise ConfigError(
            "this model cannot be served: its layers attend in chunks, and its media tokens attend to each other in "
            "both directions"
        )
    both = "media tokens of this model attend to each other in both directions, which"
    if deterministic:
        raise ConfigError(f"{both} deterministic does not support: its tiles are causal", field="deterministic")
    if backend is not None and not backend.bidirectional:
        raise ConfigError(f"{both} attention {kernel!r} does not support; use triton, flex or torch", field="attention")


def check_states_served(kept: StateLayout, deterministic: bool, speculation: Speculation | None) -> None:
    """Raise `ConfigError` if the deployment asks for an option that does not support layers with a recurrent state."""
    what = "this model's layers keep a state per sequence, which"
    if deterministic:
        raise ConfigError(f"{what} deterministic does not support: it tiles attention only", field="deterministic")
    if speculation is not None and not kept.continues:
        raise ConfigError(
            f"{what} does not continue with several tokens; speculation cannot verify its drafts: leave it out",
            field="speculation",
        )


def _ids(length: int, model: AutoregressiveModel) -> torch.Tensor:
    return (torch.arange(length, device=model.device) * 7919 + length) % model.vocab_size


def _forward(
    model: AutoregressiveModel,
    parts: list[tuple[torch.Tensor, int, int]],
    paged: PagedStep | HybridStep | None,
    states: StateStep | None = None,
) -> torch.Tensor:
    ids = torch.cat([tokens[start:stop] for tokens, start, stop in parts])
    places = torch.cat([torch.arange(start, stop, device=model.device) for _, start, stop in parts])
    positions = places.expand(model.axes, -1)
    prompts = [(None, start, stop) for _, start, stop in parts]
    batch = FlatBatch(ids, None, positions, paged, list(prompts), states)
    batch.places = [start for _, start, _ in parts]
    hidden, _ = model.forward(embedded(model, batch), batch)
    return hidden


def _run_flat(
    model: AutoregressiveModel,
    backend: AttentionBackend | None,
    sequences: list[torch.Tensor],
    steps: tuple[tuple[tuple[int, int] | None, ...], ...],
) -> list[torch.Tensor]:
    # each group of layers has its own blocks; none is freed
    layout = model.kv.layout(max(_LENGTHS) + 1)
    size = math.lcm(_SIZE, 1 if backend is None else backend.page)
    check_chunks(layout.windows, size)
    tables = _tables(size)
    blocks = sum(map(len, tables))
    store = KVStore(
        layout,
        num_blocks=blocks * layout.groups,
        block_size=size,
        dtype=model.kv.dtype,
        device=model.device,
        backend=backend,
    )
    kept = model.kv.states
    states = None if kept is None else StateStore(kept, len(sequences), model.device)
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        parts = [(which, Part(tables[which], *span)) for which, span in enumerate(step) if span is not None]
        parts.sort(key=lambda entry: step_order(entry[1]))
        groups = [
            paged_step(store, [piece for _, part in parts for piece in _moved(part, back, group * blocks, size)])
            for group, back in enumerate(layout.windows)
        ]
        paged = joined(groups, layout.group_of)
        stretches = [Stretch(which, part.start, part.stop) for which, part in parts]
        hidden = _forward(
            model,
            [(sequences[which], start, stop) for which, start, stop, _ in stretches],
            paged,
            None if states is None else state_step(states, stretches),
        )
        for (which, _), piece in zip(parts, hidden.split([part.stop - part.start for _, part in parts]), strict=True):
            pieces[which].append(piece)
    return [torch.cat(piece) for piece in pieces]


def _tables(size: int) -> list[range]:
    """The blocks of each sequence, numbered consecutively."""
    ends = list(accumulate((-(-length // size) for length in _LENGTHS), initial=0))
    return [range(*border) for border in pairwise(ends)]


def _moved(part: Part, back: AttentionWindow, first: int, size: int) -> list[Part]:
    """The part in the block numbers of a group of layers whose blocks start at `first`."""
    blocks = [first + block for block in part.blocks]
    return within_chunks(Part(blocks, part.start, part.stop), back, 0, size)


def _compare(name: str, ours: torch.Tensor, theirs: torch.Tensor, spec: KVSpec) -> None:
    # 16-bit layers may add to 32-bit hidden states (Mamba)
    exact = max(_TOLERANCE.get(dtype, _ROUGH) for dtype in (theirs.dtype, spec.dtype))
    tolerance = _COARSE if spec.coarse else exact
    by_token = (ours - theirs).abs().amax(-1).sort().values / theirs.abs().max()
    error = float(by_token[-1 - len(by_token) // 5 if exact == _ROUGH else -1])
    if not error <= tolerance:
        raise ConfigError(
            f"this model cannot be served: a sequence of {len(theirs)} tokens run {name} differs from the same run "
            f"under the model's own masks by {error:.1e} of the largest value; at most {tolerance:.0e} is allowed in "
            f"{str(spec.dtype).removeprefix('torch.')}. A difference near 1 means that its attention is not plain "
            "causal; a small one may be rounding by the kernels, and `attention: torch` uses other kernels"
        )


def _check_masks(record: LibraryRecord, max_model_len: int) -> None:
    """Check the masks at the far end of the context, which the short sequences do not reach."""
    for mask in record.masks:
        if not any(_is_causal(mask, back, max_model_len) for back in {None, *record.windows.values()}):
            raise ConfigError(
                "this model cannot be served: one of its masks is neither causal nor one of the sliding windows its "
                f"layers ask for ({_named(record) or 'none'})"
            )


def _named(record: LibraryRecord) -> list[int]:
    return sorted({back for back in record.windows.values() if isinstance(back, int)})


def _check_windows(record: LibraryRecord, spec: KVSpec) -> None:
    """Check that the KV spec's windows match the layers'. A layer with a longer window than the spec would read freed
    blocks; a layer with chunks unknown to the spec would read too far."""
    for layer, kept in enumerate(spec.windows or [None] * spec.layers):
        asked = record.windows.get(layer)
        further = isinstance(kept, int) and (not isinstance(asked, int) or asked > kept)
        if further or (asked != kept and (isinstance(kept, Chunked) or isinstance(asked, Chunked))):
            raise ConfigError(
                f"this model cannot be served: its KV spec says that layer {layer} has {_said(kept)}, but the layer "
                f"itself asks for {_said(asked)}"
            )


def _said(back: AttentionWindow) -> str:
    if isinstance(back, Chunked):
        return f"chunks of {back.size}"
    return "no window" if back is None else f"a window of {back}"


def _is_causal(mask: Callable[..., Any], back: AttentionWindow, max_model_len: int) -> bool:
    """Whether sampled mask entries equal those of a causal mask with this attention window."""
    zero = torch.tensor(0)
    for query in {max_model_len - 1, max_model_len // 2, max_model_len // 3}:
        first = first_seen(back, query)
        for key in {0, 1, query // 2, max(0, first - 1), first, query - 1, query, query + 1}:
            expected = first <= key <= query
            try:
                seen = bool(mask(zero, zero, torch.tensor(query), torch.tensor(key)))
            except IndexError:
                return False  # the mask reads data of this batch: positions alone do not determine it
            if seen != expected:
                return False
    return True
