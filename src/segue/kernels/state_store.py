"""What layers keep of a whole sequence: convolution and recurrent states, a slot per sequence.

Keys and values grow with a sequence and live in blocks (`kv_store`); a state-space, linear-attention or convolution
layer keeps tensors of one size, however long the sequence is. Who owns which slot is the engine's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from segue.kernels.kv_store import lazy_zeros
from segue.kernels.staging import upload


class StateKey(NamedTuple):
    """One of the tensors that a layer keeps."""

    layer: int
    kind: str
    """`conv` or `recurrent`."""
    number: int = 0
    """Which of that kind, where a layer has several."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """What is kept in it of one sequence."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All that a decoder keeps of a sequence besides keys and values."""

    tensors: tuple[StateTensor, ...]
    continues: bool
    """Several tokens at once can go on from a state; else only the first tokens of a sequence can be computed together,
    and all later ones singly."""

    @property
    def slot_bytes(self) -> int:
        """Of the states of one sequence."""
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
        """[n, *shape] into `slots` [n]."""
        kept = self._tensors[key]
        kept.index_copy_(0, slots, states.to(kept.dtype))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole slots, (source, target) each: all sources are read before any target is written."""
        if not pairs:
            return
        source, target = upload(np.array(pairs, dtype=np.int64), self.device).unbind(1)
        for kept in self._tensors.values():
            kept.index_copy_(0, target, kept.index_select(0, source))


class Stretch(NamedTuple):
    """Tokens [start, stop) of the sequence that has this slot."""

    slot: int
    start: int
    stop: int
    keep: int | None = None
    """A slot that has the state after these tokens, too, from this step on."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Sequences of a step that are computed in one call: all with as many tokens, all with a state or all without."""

    begin: int
    end: int
    """Their range of flat tokens, where `rows` does not say which they are."""
    slots: torch.Tensor
    """[sequences] long"""
    fresh: bool
    """They begin here: what their slots hold is another's."""
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    """[n] which of its sequences, and [n] the slots that their states are written to, too."""
    rows: torch.Tensor | None = None
    """[sequences * tokens] long: their places among the flat tokens, where these do not follow each other."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states that a step reads and writes."""

    store: StateStore
    groups: list[StateGroup]
    tokens: int
    """Flat ones, over all groups."""
    stretches: Sequence[Stretch]
    """What it was planned for, in the order of the flat batch."""


def state_step(store: StateStore, stretches: Sequence[Stretch]) -> StateStep:
    """Plan a step. `stretches`: in the order of the flat batch. Those of one sequence follow each other, and are
    computed one after the other; what is alike is computed in one call."""
    alike: dict[tuple[int, int, bool], list[tuple[int, Stretch]]] = {}
    begin = part = 0
    before: Stretch | None = None
    for one in stretches:
        part = part + 1 if before is not None and before.slot == one.slot else 0
        alike.setdefault((part, one.stop - one.start, one.start == 0), []).append((begin, one))
        begin, before = begin + one.stop - one.start, one
    # a part of a sequence comes after the one before it
    order = sorted(alike, key=lambda key: key[0])
    return StateStep(store, [_group(store, alike[key], key[1]) for key in order], begin, stretches)


def _group(store: StateStore, members: Sequence[tuple[int, Stretch]], tokens: int) -> StateGroup:
    """`members`: the first flat token of each, and its stretch."""
    alike = [stretch for _, stretch in members]
    fresh = alike[0].start == 0
    assert fresh or tokens == 1 or store.layout.continues, "several tokens that would forget the state before them"
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
