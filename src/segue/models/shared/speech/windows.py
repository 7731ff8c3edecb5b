"""Pieces of an utterance that are decoded with the frames around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.engines.contract import Payload
from segue.engines.module.contract import Result, Work


@dataclass(slots=True)
class WindowPiece:
    """One piece of an utterance, as a work item. Keeps its result, so that a repeated call computes nothing twice."""

    window: Tensor
    """The codes of its frames and of those around it, as the network takes them."""
    skipped: int
    """Frames of the window before its own."""
    count: int
    start: int
    """Index of its first frame in the utterance."""
    payload: Payload | None = None


def decode_windows(works: Sequence[Work], decode: Callable[[Tensor], Tensor], hop: int, rate: int) -> list[Result]:
    """Decode pieces of one shape as one batch.

    `decode`: [n, *window] long → [n, samples of the windows]. `hop`: samples per frame; `rate`: samples per second.
    """
    pieces: list[WindowPiece] = [work.item for work in works]
    asked = [piece for piece in pieces if piece.payload is None]
    if asked and asked[0].count:
        waves = decode(torch.stack([piece.window for piece in asked])).float().cpu()
    else:  # an utterance that ended with a piece, or without a frame
        waves = torch.empty(len(asked), 0)
    for piece, wave in zip(asked, waves, strict=True):
        samples = wave[piece.skipped * hop : (piece.skipped + piece.count) * hop].clone()
        piece.payload = {"samples": samples, "start": piece.start * hop, "sample_rate": rate}
    return [Result(piece.payload) for piece in pieces]
