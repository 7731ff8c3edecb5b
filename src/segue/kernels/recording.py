"""A function on a CPU as a recording: its calls of the compiled kernels and the small operators between them are run
again from a list by one call, without the Python in between. What a CUDA graph is on a GPU.

`segue.kernels.recorder` makes it. What is not in a list stays a call of torch, whose result is copied to where the list
expects it. Inputs are the same tensors at every replay, with other values in them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from segue.kernels.arena import Place
from segue.kernels.native import Attention, Call, FullAttention, Library

PRODUCT, WRITE, ATTEND, NORM, GATE, EACH, FULLY, MODULATE, TURN = range(9)
"""Kinds of calls, as kernels.c numbers them."""
POINTERS = {
    PRODUCT: (0, 3, 5, 6, 9),
    WRITE: (0, 3, 6, 9, 12),
    ATTEND: (2,),
    NORM: (0, 3, 4),
    GATE: (0, 1),
    EACH: (5, 10, 15),
    FULLY: (1,),
    MODULATE: (0, 1, 2, 4),
    TURN: (0, 3, 4),
}
"""Which arguments of a call are addresses; those within a structure besides."""
POINTED: dict[type[ctypes.Structure], tuple[str, ...]] = {
    Attention: ("q", "keys", "values", "blocks", "lengths", "out"),
    FullAttention: ("q", "keys", "values", "blocks", "seen", "spans", "out"),
}


class NotRecordable(Exception):
    """A function that cannot be run again from a recording; the message says why."""


class TooLarge(NotRecordable):
    """A function whose results and intermediate ones do not fit into the memory that was given."""

    def __init__(self, message: str, made: Any) -> None:
        """`made`: what it gave."""
        super().__init__(message)
        self.made = made


@dataclass(slots=True)
class Entry:
    """One call of the list."""

    kind: int
    of: list[int]
    number: float = 0.0
    structure: ctypes.Structure | None = None
    """Its first argument, if that is one."""
    lies: list[tuple[int | str, Place]] = field(default_factory=list)
    """Arguments, or fields of the structure, that are addresses in a place."""

    def move(self, origin: int) -> None:
        """Have its addresses be those in the arena at `origin`."""
        for where, place in self.lies:
            if place.offset < 0:
                continue
            moved = origin + place.offset - place.base
            if isinstance(where, int):
                self.of[where] += moved
            else:
                setattr(self.structure, where, getattr(self.structure, where) + moved)


class Recording:
    """Call it to run again what was recorded."""

    def __init__(
        self,
        compiled: Library,
        steps: Sequence[Entry | Callable[[], None]],
        result: Any,
        *,
        kept: Sequence[Any],
        nbytes: int,
    ) -> None:
        """`kept`: whatever the steps point to. `nbytes`: of results and intermediate ones."""
        self.result = result
        """Written anew by every run."""
        self._compiled = compiled
        self._threads = torch.get_num_threads()
        self._kept = list(kept)
        self.nbytes = nbytes
        self._parts: list[Callable[[], None] | tuple[Any, int]] = []
        entries: list[Entry] = []
        for step in [*steps, None]:
            if isinstance(step, Entry):
                entries.append(step)
                continue
            if entries:
                self._parts.append(self._listed(entries))
                entries = []
            if step is not None:
                self._parts.append(step)

    @property
    def calls(self) -> tuple[int, int]:
        """How many calls of kernels there are, and of torch."""
        listed = sum(part[1] for part in self._parts if isinstance(part, tuple))
        return listed, sum(not isinstance(part, tuple) for part in self._parts)

    @torch.inference_mode()
    def __call__(self) -> None:
        for part in self._parts:
            if isinstance(part, tuple):
                self._compiled.replay(self._compiled.number, ctypes.addressof(part[0]), part[1], self._threads)
            else:
                part()

    def _listed(self, entries: list[Entry]) -> tuple[Any, int]:
        calls = (Call * len(entries))()
        for call, entry in zip(calls, entries, strict=True):
            call.kind, call.number = entry.kind, entry.number
            call.of[: len(entry.of)] = entry.of
            if entry.structure is not None:
                self._kept.append(entry.structure)
                call.of[0] = ctypes.addressof(entry.structure)
        return calls, len(entries)
