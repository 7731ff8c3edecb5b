"""Recordings, the CPU counterpart of CUDA graphs: replays a function's compiled kernels and the small operators between
them from a list in one call, without Python in between.

`segue.kernels.cpu.recorder` makes them. Other calls stay calls of torch, whose results are copied to the addresses
that the list expects. Inputs are the same tensors in every replay, with other values in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from segue.kernels.cpu.arena import Region
from segue.kernels.cpu.native import Attention, Call, Experts, FullAttention, Library

GEMM, WRITE, ATTEND, NORM, GATE, EACH, FULLY, MODULATE, ROPE, EXPERTS, DRAW, SNAKE = range(12)
"""Kinds of calls, numbered as in kernels.c."""
POINTERS = {
    GEMM: (0, 3, 5, 6, 9),
    WRITE: (0, 3, 6, 9, 12),
    ATTEND: (2,),
    NORM: (0, 3, 4),
    GATE: (0, 1),
    EACH: (5, 10, 15),
    FULLY: (1,),
    MODULATE: (0, 1, 2, 4),
    ROPE: (0, 3, 4),
    EXPERTS: (),
    DRAW: (0, 2, 4, 6, 7),
    SNAKE: (0, 3, 4, 5),
}
"""Indices of the arguments that are addresses; addresses within a structure are in `POINTED`."""
POINTED: dict[type[ctypes.Structure], tuple[str, ...]] = {
    Attention: ("q", "keys", "values", "blocks", "lengths", "out"),
    FullAttention: ("q", "keys", "values", "blocks", "seen", "spans", "out"),
    Experts: ("x", "chosen", "shares", "rows", "gates", "gated", "mixed", "order", "y"),
}


@dataclass(slots=True)
class Entry:
    """One call of the list."""

    kind: int
    of: list[int]
    number: float = 0.0
    structure: ctypes.Structure | None = None
    """Its first argument, if that is a structure."""
    lies: list[tuple[int | str, Region]] = field(default_factory=list)
    """Arguments, or fields of the structure, that are addresses in a region."""

    def move(self, origin: int) -> None:
        """Relocate its addresses to the arena at `origin`."""
        for where, place in self.lies:
            if place.offset < 0:
                continue
            moved = origin + place.offset - place.base
            if isinstance(where, int):
                self.of[where] += moved
            else:
                setattr(self.structure, where, getattr(self.structure, where) + moved)


class Recording:
    """A callable that replays the recorded calls."""

    def __init__(
        self,
        compiled: Library,
        steps: Sequence[Entry | Callable[[], None]],
        result: Any,
        *,
        kept: Sequence[Any],
        nbytes: int,
    ) -> None:
        """`kept`: everything that the steps point to. `nbytes`: of results and intermediates."""
        self.result = result
        """Overwritten by every replay."""
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
        """Number of kernel calls, and of torch calls."""
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
