"""Run a recurrent network over the flat batch of the autoregressive engine, which keeps a state per sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.engines.autoregressive.contract import FlatBatch, KVSpec
from segue.kernels.kv.layout import NOTHING
from segue.kernels.kv.states import StateKey, StateLayout, StateTensor

_KEY = StateKey(0, "recurrent")

Run = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""Inputs [n, t, width] of n sequences, and their states [n, *shape] (None: they begin here) → outputs [n, t, hidden],
and the states after them. Several tokens must give what they give one by one."""


def recurrent_spec(shape: tuple[int, ...], dtype: torch.dtype, *, continues: bool = True) -> KVSpec:
    """The spec of a decoder that attends to nothing and keeps a state of `shape` per sequence. `continues`: several
    tokens at once can go on from a state, which chunked prefill and prefix caching need."""
    layout = StateLayout((StateTensor(_KEY, shape, dtype),), continues)
    return KVSpec(layers=1, kv_heads=0, head_dim=0, dtype=dtype, shapes=(NOTHING,), states=layout)


def run_recurrent(run: Run, embeds: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
    """[tokens, width] of a batch → [tokens, hidden]: each sequence goes on from its own state, which is kept."""
    if batch.states is None:  # the check at load, of one whole sequence
        return run(embeds[None], None)[0][0]
    store = batch.states.store
    made: torch.Tensor | None = None
    for group in batch.states.groups:
        rows = torch.arange(group.begin, group.end, device=embeds.device) if group.rows is None else group.rows
        given = embeds[rows].unflatten(0, (len(group.slots), -1))
        outputs, states = run(given, None if group.fresh else store.read(_KEY, group.slots))
        store.write(_KEY, group.slots, states)
        if group.kept is not None:
            places, slots = group.kept
            store.write(_KEY, slots, states[places])
        if made is None:
            made = outputs.new_empty(len(embeds), outputs.shape[-1])
        made[rows] = outputs.flatten(0, 1)
    assert made is not None, "a step has at least one sequence"
    return made
