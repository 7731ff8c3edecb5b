"""Identifies attention calls of models whose layers do not: the step that a call belongs to, and the keys and values
that it uses.

Layers that do not pass keyword arguments on would lose the step, so it is stored here while a decoder runs. Layers that
call attention more than once per pass, with one half of their values each time or in loops over the same weights, have
one layer number for all their calls; their calls are counted instead, and each has its own keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Calls:
    """One pass through a decoder."""

    paged: Any
    """Its step."""
    counted: bool
    """A call is numbered by its position in the pass, not by its layer."""
    made: int = 0
    """Calls so far."""


_calls: ContextVar[Calls | None] = ContextVar("attention_calls", default=None)


@contextmanager
def attention_calls(paged: Any, *, counted: bool) -> Iterator[Calls]:
    """Context for one pass through a decoder."""
    calls = Calls(paged, counted)
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def called(module: torch.nn.Module, paged: Any) -> tuple[int, Any]:
    """(number of the keys and values that the call uses, its step) for a call from `module`, which received `paged`."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    calls = _calls.get()
    if calls is None:
        return layer, paged
    number = calls.made
    calls.made += 1
    return number if calls.counted else layer, calls.paged if paged is None else paged
