"""How far the layers of a decoder look back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from segue.messages.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Chunked:
    """A query sees the tokens of its own chunk up to itself: chunks of so many follow each other from the first token
    on."""

    size: int


LookBack: TypeAlias = int | Chunked | None
"""A window: how many tokens a query sees, itself included (Beltagy et al., 2020, §3.1); chunks; None: all before it."""


def first_seen(back: LookBack, position: int) -> int:
    """The first position that a query at `position` sees."""
    if back is None:
        return 0
    if isinstance(back, Chunked):
        return position // back.size * back.size
    return max(0, position + 1 - back)


def check_chunks(backs: Sequence[LookBack], block_size: int) -> None:
    """Raise `ConfigError` where a block would hold tokens of two chunks."""
    for back in backs:
        if isinstance(back, Chunked) and back.size % block_size:
            raise ConfigError(
                f"block_size is {block_size}, but layers of this model attend in chunks of {back.size} tokens; it must "
                f"divide {back.size}",
                field="block_size",
            )
