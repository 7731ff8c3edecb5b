"""Per-sequence state tensors of layers: convolution and recurrent states, one slot per sequence.

Keys and values grow with a sequence and live in blocks (`store`); a state-space, linear-attention or convolution
layer keeps tensors of constant size, however long the sequence is. The engine tracks the owners of slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from segue.kernels.kv.store import lazy_zeros
from segue.kernels.staging import upload


class StateKey(NamedTuple):
    """Identifies one of the state tensors of a layer."""

    layer: int
    kind: str
    """`conv` or `recurrent`."""
    number: int = 0
    """Index among those of that kind, if a layer has several."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Shape and dtype of one state tensor per sequence."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All state of a sequence besides keys and values."""

    tensors: tuple[StateTensor, ...]
    continues: bool
    """Several tokens at once can continue from a state; else only the first tokens of a sequence can be computed
    together, and all later ones singly."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors)


class StateStore:
    """The states of many sequences. Memory is allocated once."""

    def __init__(self, layout: StateLayout, slots: int, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._tensors = {
            tensor.key: lazy_zeros((slots, *tensor.shape), tensor.dtype, device) for tensor in layout.tensors
        }

    def read(self, key: StateKey, slots: torch.Tensor) -> torch.Tensor:
        """[n] slots → [n, *shape], a copy."""
        return self._tensors[key].index_select(0, slots)

    def write(self, key: StateKey, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Write [n, *shape] to `slots` [n]."""
        kept = self._tensors[key]
        kept.index_copy_(0, slots, states.to(kept.dtype))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole slots, as (source, target): all sources are read before any target is written."""
        if not pairs:
            return
        source, target = upload(np.array(pairs, dtype=np.int64), self.device).unbind(1)
        for kept in self._tensors.values():
            kept.index_copy_(0, target, kept.index_select(0, source))


class Stretch(NamedTuple):
    """Tokens [start, stop) of the sequence in this slot."""

    slot: int
    start: int
    stop: int
    keep: int | None = None
    """A further slot that receives the state after these tokens."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Sequences of a step computed in one call: all with equally many tokens, all with a state or all without."""

    begin: int
    end: int
    """Their range of flat tokens, unless `rows` lists them."""
    slots: torch.Tensor
    """[sequences] long"""
    fresh: bool
    """They start here: their slots hold stale states of other sequences."""
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    """[n] indices of its sequences, and [n] the further slots that receive their states."""
    rows: torch.Tensor | None = None
    """[sequences * tokens] long: their indices among the flat tokens, if these are not consecutive."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states that a step reads and writes."""

    store: StateStore
    groups: list[StateGroup]
    tokens: int
    """Number of flat tokens over all groups."""
    stretches: Sequence[Stretch]
    """The stretches it was planned for, in the order of the flat batch."""


def state_step(store: StateStore, stretches: Sequence[Stretch]) -> StateStep:
    """Plan a step. `stretches`: in the order of the flat batch. Those of one sequence are consecutive, and are computed
    one after the other; similar ones of different sequences are computed in one call."""
    alike: dict[tuple[int, int, bool], list[tuple[int, Stretch]]] = {}
    begin = part = 0
    before: Stretch | None = None
    for one in stretches:
        part = part + 1 if before is not None and before.slot == one.slot else 0
        alike.setdefault((part, one.stop - one.start, one.start == 0), []).append((begin, one))
        begin, before = begin + one.stop - one.start, one
    # the parts of a sequence are computed in order
    order = sorted(alike, key=lambda key: key[0])
    return StateStep(store, [_group(store, alike[key], key[1]) for key in order], begin, stretches)


def _group(store: StateStore, members: Sequence[tuple[int, Stretch]], tokens: int) -> StateGroup:
    """`members`: the first flat token of each stretch, and the stretch."""
    alike = [stretch for _, stretch in members]
    fresh = alike[0].start == 0
    assert fresh or tokens == 1 or store.layout.continues, "several tokens cannot continue from a state here"
    begins = np.array([begin for begin, _ in members], dtype=np.int64)
    begin, end = int(begins[0]), int(begins[0]) + tokens * len(alike)
    rows = None
    if np.any(begins != np.arange(begin, end, tokens)):
        rows = upload((begins[:, None] + np.arange(tokens)).ravel(), store.device)
    slots = upload(np.array([one.slot for one in alike], dtype=np.int64), store.device)
    return StateGroup(begin, end, slots, fresh, _kept(store, alike), rows)


def _kept(store: StateStore, alike: Sequence[Stretch]) -> tuple[torch.Tensor, torch.Tensor] | None:
    pairs = [(row, one.keep) for row, one in enumerate(alike) if one.keep is not None]
    if not pairs:
        return None
    rows, slots = upload(np.array(pairs, dtype=np.int64).T.copy(), store.device)
    return rows, slots
