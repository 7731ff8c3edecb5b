"""Decode pieces of utterances by a network that looks ahead: each with the frames around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from segue.models.shared.speech.pieces import CodePiece, Past


class WindowDecoder(ABC):
    """`PieceDecoder` over a network that is called with windows of frames. An utterance's past is the frames that its
    next window has again."""

    dtype: torch.dtype = torch.long

    def __init__(self, row: int, groups: int, counts: tuple[int, ...], around: tuple[int, int], hop: int) -> None:
        """`around`: `behind` and `ahead`. `hop`: samples per frame."""
        self.row, self.groups, self.counts = row, groups, counts
        self.behind, self.ahead = around
        self.hop = hop

    @abstractmethod
    def waves(self, codes_BKn: Tensor) -> Tensor:
        """[B, K, n] long on the CPU → the windows' samples [B, hop · n]."""

    @abstractmethod
    def frames(self, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """As in `PieceDecoder`."""

    @torch.inference_mode()
    def decode(self, pieces: Sequence[CodePiece]) -> list[tuple[Tensor, Past | None]]:
        windows = [torch.cat([*(piece.past or ()), piece.codes], dim=1) for piece in pieces]
        waves = self.waves(torch.stack(windows)).float().cpu()
        decoded: list[tuple[Tensor, Past | None]] = []
        for piece, window, wave in zip(pieces, windows, waves, strict=True):
            begin, end = window.shape[1] - piece.codes.shape[1], window.shape[1] - piece.ahead
            past = window[:, max(end - self.behind, 0) : end].clone()
            decoded.append((wave[begin * self.hop : end * self.hop].clone(), [past]))
        return decoded
