"""What the layers of some models do not say themselves: the step that a call of attention belongs to, and whose keys
and values it is about.

Layers that hand no keyword arguments on would lose the step; it is here while a decoder runs. Layers that call
attention more than once per pass, with one half of their values each time or in loops over the same weights, have one
number for all their calls: these are counted instead, and each has keys and values of its own.
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
    """A call's number is its place in the pass, not that of its layer."""
    made: int = 0
    """Calls so far."""


_calls: ContextVar[Calls | None] = ContextVar("attention_calls", default=None)


@contextmanager
def attention_calls(paged: Any, *, counted: bool) -> Iterator[Calls]:
    """Within it a decoder runs once."""
    calls = Calls(paged, counted)
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def called(module: torch.nn.Module, paged: Any) -> tuple[int, Any]:
    """(whose keys and values the call is about, the step) of a call from `module`, which was given `paged`."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    calls = _calls.get()
    if calls is None:
        return layer, paged
    number = calls.made
    calls.made += 1
    return number if calls.counted else layer, calls.paged if paged is None else paged
