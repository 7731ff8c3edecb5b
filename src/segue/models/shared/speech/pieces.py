"""Decode utterances piece by piece, and run causal networks over pieces: each continues where the one before it ended.

Each layer of a causal network has a bounded left context and no look-ahead. The left context is kept per utterance
(`Past`), so that the pieces of an utterance, in any split, give what one call over the whole utterance gives. Networks
that look ahead are in `windows`.

B utterances, n frames of each, K codes or numbers per frame, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from segue.models.shared.speech.rows import check_codes

GROUPS = (2, 2, 4, 4, 8)
"""Frames of an utterance's first, second, … piece in a causal network; the last entry repeats. Later pieces grow, as
each costs a call of every layer."""

Past = list[Tensor]
"""What a decoder keeps of one utterance. A causal network: the left context of its layers in the order of their calls,
[C, t], or [heads, frames, head_dim]."""


@dataclass(frozen=True, slots=True)
class CodePiece:
    """The next frames of one utterance."""

    codes: Tensor
    """[K, n + ahead], n ≥ 1: codes (long) or numbers (float32)."""
    first: int
    """Frames of the utterance before these."""
    past: Past | None
    """None at its first frame."""
    ahead: int = 0
    """How many frames at the end of `codes` belong to later pieces."""


class PieceDecoder(Protocol):
    """A network that decodes utterances piece by piece, and what its pieces are."""

    row: int
    """Codes or numbers of a row as it arrives."""
    groups: int
    """K."""
    dtype: torch.dtype
    """Of rows: long for codes, float32 for numbers."""
    counts: tuple[int, ...]
    """Frames of an utterance's first, second, … piece; the last entry repeats."""
    behind: int
    """At most so many frames before a piece are decoded with it again."""
    ahead: int
    """Frames after a piece that are decoded with it, unless the utterance ends before them."""

    def frames(self, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """[m, row] the rows that are not used up; the first has index `first` in the utterance → ([n, K] the frames
        that they complete, the rows that later frames need too). Raises `StageFailed` for codes that do not exist."""

    def decode(self, pieces: Sequence[CodePiece]) -> list[tuple[Tensor, Past | None]]:
        """Pieces of equal shape, all of them the first of their utterance or none: (samples [t] on the CPU, the
        utterance's new past) of each."""


class CausalDecoder(ABC):
    """`PieceDecoder` over a causal network. A row is a frame."""

    counts: tuple[int, ...] = GROUPS
    behind = ahead = 0

    def __init__(self, groups: int, codebook: int | None, device: torch.device) -> None:
        """`codebook`: codes of each codebook; None: frames are rows of numbers."""
        self.row = self.groups = groups
        self.dtype = torch.float32 if codebook is None else torch.long
        self.device = device
        self._codebook = codebook

    @abstractmethod
    def waves(self, codes_BKn: Tensor, first: Tensor, carry: Carry) -> Tensor:
        """[B, K, n] on `device`, whose frame i is frame first[b] + i of utterance b → samples [B, t]."""

    def frames(self, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        if self._codebook is not None:
            check_codes(rows, self._codebook)
        return rows, rows[:0]

    @torch.inference_mode()
    def decode(self, pieces: Sequence[CodePiece]) -> list[tuple[Tensor, Past | None]]:
        carry = Carry(pieces)
        codes_BKn = torch.stack([piece.codes for piece in pieces]).to(self.device)
        first = torch.tensor([piece.first for piece in pieces], device=self.device)
        waves = self.waves(codes_BKn, first, carry).float().cpu()
        return [(wave.clone(), past) for wave, past in zip(waves, carry.pasts(), strict=True)]


class Carry:
    """Left context of the layers in one call; a layer's index is the number of calls before its own."""

    def __init__(self, pieces: Sequence[CodePiece]) -> None:
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
