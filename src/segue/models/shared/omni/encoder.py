"""The base class of encoder stages: vision and audio encoders behind one interface.

One work item per medium, so that a long video does not delay the images of other requests; requests share calls.
Shapes: p patches, f mel frames, m mel bins, n rows of a medium, H the thinker's hidden size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import StageFailed
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes

FRAMES_PER_SECOND = 100
"""Mel frames per second of a recording."""
PATCHES = 256
"""Typical number of rows per encoder call; CPU linear layers choose their weight layout for it."""


@dataclass(frozen=True, slots=True)
class Medium:
    """One image, video clip or audio recording, as the input stage prepared it."""

    kind: str
    hash: bytes
    data: torch.Tensor
    """Images, clips: [p, patch values] · recordings: [m, f]."""
    grid: tuple[int, int, int] | None = None
    """Images and clips: patches in time, height, width."""
    width: int = 0
    """Recordings: the frames that their pieces are padded to, for encoders whose rows depend on it."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of media that the encoders accept."""

    patch_values: int
    """Values of one patch: channels × frames × height × width."""
    merged: int
    """Patches per row."""
    mel_bins: int


class MediaEncoder(ABC):
    """`ModuleModel` over a vision and an audio encoder.

    Options: `cache_bytes`, for results that are kept.
    """

    def __init__(self, ctx: LoadContext, shapes: Shapes) -> None:
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.shapes = shapes
        self.cache = EncoderCache(cache_bytes(ctx))

    @abstractmethod
    def encode_images(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode images and clips in one call; each attends only to itself. → their rows, [n, …] each."""

    @abstractmethod
    def encode_audio(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode recordings in one call. → their rows, [n, …] each."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encode a small image and one second of audio, bypassing the cache."""
        shapes = self.shapes
        side = 2 * math.isqrt(shapes.merged)
        self.encode_images([Medium("image", b"", torch.zeros(side * side, shapes.patch_values), (1, side, side))])
        second = torch.zeros(shapes.mel_bins, FRAMES_PER_SECOND, dtype=self.dtype)
        self.encode_audio([Medium("audio", b"", second, width=FRAMES_PER_SECOND)])

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's chunk → one work item per medium, in order. Raises `StageFailed` for impossible shapes."""
        media = [self._medium(item) for item in payload["media"]]
        works = [self._work(state, medium) for medium in media]
        if final:
            if not works:
                works = [Work(state, None, bucket="none")]
            works[-1].last = True
        return works

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Encode the media of one bucket together; equal media, and those in the cache, only once."""
        media = {(medium.kind, medium.hash): medium for work in works if (medium := work.item) is not None}
        rows = self.cache.through(media, self._encode)
        return [Result(_payload(work.item, rows)) for work in works]

    def end(self, state: str) -> None:
        """Nothing to free: no state is kept per request."""

    def _medium(self, item: Payload) -> Medium:
        kind = item["kind"]
        if kind == "audio":
            medium = Medium(kind, item["hash"], item["input_features"], width=item.get("width", 0))
            right = medium.data.ndim == 2 and medium.data.shape[0] == self.shapes.mel_bins and medium.data.shape[1] > 0
            wanted = f"[{self.shapes.mel_bins}, frames]"
        else:
            grid = tuple(int(size) for size in item["grid_thw"])
            patches = grid[0] * grid[1] * grid[2]
            medium = Medium(kind, item["hash"], item["pixel_values"], (grid[0], grid[1], grid[2]))
            right = list(medium.data.shape) == [patches, self.shapes.patch_values] and patches > 0
            wanted = f"[{patches}, {self.shapes.patch_values}]"
        if not right:
            raise StageFailed(f"{kind} of shape {list(medium.data.shape)} reached the encoder; {wanted} is right")
        return medium

    def _work(self, request_id: str, medium: Medium) -> Work:
        bucket: Hashable = "vision"
        if medium.kind == "audio":
            bucket = ("audio", medium.width) if medium.width else "audio"
        known = (medium.kind, medium.hash) in self.cache
        length = medium.data.shape[1] if medium.kind == "audio" else medium.data.shape[0]
        return Work(request_id, medium, bucket=bucket, cost=1 if known else length, ordered=False)

    def _encode(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Media of one bucket → their rows."""
        return self.encode_audio(media) if media[0].kind == "audio" else self.encode_images(media)


def _payload(medium: Medium | None, rows: dict[tuple[str, bytes], torch.Tensor]) -> Payload:
    if medium is None:
        return {"media": []}
    return {"media": [{"kind": medium.kind, "hash": medium.hash, "embeds": rows[medium.kind, medium.hash]}]}
