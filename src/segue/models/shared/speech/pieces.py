"""Run a causal network over pieces of utterances: each piece continues where the one before it ended.

Each layer of such a network has a bounded left context and no look-ahead. The left context is kept per utterance
(`Past`), so that the pieces of an utterance, in any split, give what one call over the whole utterance gives.

B utterances, n frames of each, K codes or numbers per frame, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Past = list[Tensor]
"""Left context of the layers for one utterance, in the order of their calls: [C, t], or [heads, frames, head_dim]."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next frames of one utterance."""

    codes: Tensor
    """[K, n], n ≥ 1: codes (long) or numbers (float32)."""
    first: int
    """Frames of the utterance before these."""
    past: Past | None
    """None at its first frame."""


class PieceDecoder(Protocol):
    """A network that decodes utterances piece by piece."""

    groups: int
    """K."""

    @property
    def codebook(self) -> int | None:
        """Codes of each codebook; None: frames are rows of numbers."""

    def decode(self, pieces: Sequence[Piece]) -> list[tuple[Tensor, Past | None]]:
        """Pieces of equal length, all of them the first of their utterance or none: (samples [t] on the CPU, the
        utterance's new past) of each."""


class Carry:
    """Left context of the layers in one call; a layer's index is the number of calls before its own."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        pasts = [piece.past for piece in pieces if piece.past is not None]
        assert len(pasts) in (0, len(pieces)), "first pieces run apart from later ones"
        self._past = [torch.stack(own) for own in zip(*pasts, strict=True)] if pasts else None
        self._kept: list[Tensor] = []

    def behind(self, x: Tensor, size: int, dim: int = -1, *, padded: bool = True) -> Tensor:
        """Put the last `size` inputs before `x` in front of it, and keep its own last ones. At the utterances' first
        frames these are zeros, or nothing if not `padded`."""
        if self._past is not None:
            x = torch.cat([self._past[len(self._kept)], x], dim=dim)
        elif padded:
            shape = list(x.shape)
            shape[dim] = size
            x = torch.cat([x.new_zeros(shape), x], dim=dim)
        self._kept.append(x.narrow(dim, x.shape[dim] - size, size))
        return x

    def pasts(self) -> list[Past]:
        """Per utterance, for its next piece."""
        # views would keep the past of the whole batch alive
        return [[part.clone() for part in own] for own in zip(*(kept.unbind() for kept in self._kept), strict=True)]


class Ring:
    """The cache that the library's attention layers append their keys and values to."""

    def __init__(self, carry: Carry, size: int) -> None:
        """`size`: positions before the current one that a layer attends to."""
        self._carry, self._size = carry, size

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: object) -> tuple[Tensor, Tensor]:
        """[B, heads, n, head_dim] → the same behind those of the frames before."""
        return self._carry.behind(keys, self._size, dim=-2), self._carry.behind(values, self._size, dim=-2)


def window(first: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """(positions [B, count], mask [B, 1, count, size - 1 + count] bool) of `count` frames from `first` [B] on, each of
    which attends to `size` frames, itself included, over the keys that a `Ring` of `size - 1` gives."""
    back = size - 1
    positions = first[:, None] + torch.arange(count, device=first.device)
    keys = first[:, None] + torch.arange(-back, count, device=first.device)
    ago = positions[:, :, None] - keys[:, None]
    return positions, ((ago >= 0) & (ago < size) & (keys >= 0)[:, None])[:, None]
