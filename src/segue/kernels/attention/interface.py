"""Types shared by layers and attention backends: attention windows, the options of a layer, the backend protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from segue.messages.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Chunked:
    """Chunked attention: a query sees the tokens of its own chunk up to itself. Chunks of `size` tokens start at the
    first token."""

    size: int


AttentionWindow: TypeAlias = int | Chunked | None
"""A window: the number of tokens that a query sees, including itself (Beltagy et al., 2020, §3.1); chunks; None: all
tokens before it."""


def first_seen(back: AttentionWindow, position: int) -> int:
    """The first position that a query at `position` sees."""
    if back is None:
        return 0
    if isinstance(back, Chunked):
        return position // back.size * back.size
    return max(0, position + 1 - back)


def check_chunks(backs: Sequence[AttentionWindow], block_size: int) -> None:
    """Raise `ConfigError` if a block would hold tokens of two chunks."""
    for back in backs:
        if isinstance(back, Chunked) and back.size % block_size:
            raise ConfigError(
                f"block_size is {block_size}, but layers of this model attend in chunks of {back.size} tokens; it must "
                f"divide {back.size}",
                field="block_size",
            )


class AttentionOptions(NamedTuple):
    """Options of a layer's attention besides causality."""

    scaling: float
    window: int | None = None
    """A query sees this many keys, including itself (Beltagy et al., 2020, §3.1)."""
    softcap: float | None = None
    """Scores are `softcap * tanh(scores / softcap)` (Bello et al., 2017)."""
    sinks: torch.Tensor | None = None
    """[heads]: one extra logit per head in the softmax, without a value."""

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


StepT = TypeVar("StepT", contravariant=True)


class Attends(Protocol[StepT]):
    """A backend: writes a step's K and V to the store and computes attention over the visible tokens."""

    recordable: bool
    """It reads no value on the host while it runs, so decode steps can be captured in graphs (`decode_graphs`)."""
    upcasts: bool
    """It can read K and V stored in fewer bits than the queries, upcasting them."""
    bidirectional: bool
    """It supports bidirectional spans (`Part.bidirectional`)."""
    page: int
    """The tokens of a block must be a multiple of this."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepT, form: AttentionOptions
    ) -> torch.Tensor:
        """q [heads, tokens, head_dim], k [kv_heads, tokens, head_dim], v [kv_heads, tokens, value_dim] →
        [tokens, heads, value_dim]. `step` is the one of the layer's group."""
