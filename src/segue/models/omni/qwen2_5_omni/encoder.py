"""Run the thinker's vision and audio encoders as a stage of their own.

One work item per medium, so that a long video does not delay the images of other requests; requests share calls.
Shapes: p patches, f mel frames, m mel bins, n rows of a medium, H the thinker's hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.kernels.linear.linear import pack_linears
from segue.messages.errors import StageFailed
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniVisionEncoderConfig
from segue.models.omni.qwen2_5_omni.loading import Encoders, load_config, load_encoders
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes


@dataclass(frozen=True, slots=True)
class Medium:
    """One image, video clip or audio recording, as the input stage prepared it."""

    kind: str
    hash: bytes
    data: torch.Tensor
    """Images, clips: [p, patch values] · recordings: [m, f]."""
    grid: tuple[int, int, int] | None = None
    """Images and clips: patches in time, height, width."""


FRAMES_PER_SECOND = 100
"""Mel frames per second of a recording."""
PATCHES = 256
"""Typical number of rows per encoder call; CPU linear layers choose their weight layout for it."""


class Encoder:
    """`ModuleModel` over the vision and the audio encoder."""

    def __init__(self, ctx: LoadContext) -> None:
        capacity = cache_bytes(ctx)
        config = load_config(ctx)
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.hidden = config.thinker_config.text_config.hidden_size
        self.patch_values = _patch_values(config.thinker_config.vision_config)
        self.mel_bins = config.thinker_config.audio_config.num_mel_bins
        self.merged = config.thinker_config.vision_config.spatial_merge_size**2
        self.cache = EncoderCache(capacity)
        self._net: Encoders = load_encoders(ctx, config)
        pack_linears(self._net, PATCHES)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encode a small image and one second of audio, bypassing the cache."""
        side = 2 * math.isqrt(self.merged)
        self._see([Medium("image", b"", torch.zeros(side * side, self.patch_values), (1, side, side))])
        self._hear([Medium("audio", b"", torch.zeros(self.mel_bins, FRAMES_PER_SECOND, dtype=self.dtype))])

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
            medium = Medium(kind, item["hash"], item["input_features"])
            right = medium.data.ndim == 2 and medium.data.shape[0] == self.mel_bins and medium.data.shape[1] > 0
            wanted = f"[{self.mel_bins}, frames]"
        else:
            grid = tuple(int(size) for size in item["grid_thw"])
            patches = grid[0] * grid[1] * grid[2]
            medium = Medium(kind, item["hash"], item["pixel_values"], (grid[0], grid[1], grid[2]))
            right = list(medium.data.shape) == [patches, self.patch_values] and patches > 0
            wanted = f"[{patches}, {self.patch_values}]"
        if not right:
            raise StageFailed(f"{kind} of shape {list(medium.data.shape)} reached the encoder; {wanted} is right")
        return medium

    def _work(self, request_id: str, medium: Medium) -> Work:
        bucket = "audio" if medium.kind == "audio" else "vision"
        known = (medium.kind, medium.hash) in self.cache
        length = medium.data.shape[1] if bucket == "audio" else medium.data.shape[0]
        return Work(request_id, medium, bucket=bucket, cost=1 if known else length, ordered=False)

    def _encode(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Media of one bucket → [n, H] each."""
        return self._hear(media) if media[0].kind == "audio" else self._see(media)

    def _see(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode images and clips in one flat call; each attends only to itself. → [n, H] each."""
        grids = torch.tensor([medium.grid for medium in media], device=self.device)
        pixels = torch.cat([medium.data.to(device=self.device, dtype=self.dtype) for medium in media])
        merged = self._net.visual(pixels, grid_thw=grids).pooler_output
        counts = (grids.prod(-1) // self.merged).tolist()
        return [rows.clone() for rows in merged.split(counts)]

    def _hear(self, media: Sequence[Medium]) -> list[torch.Tensor]:
        """Encode recordings in one flat call, each cut into its own windows. → [n, H] each."""
        lengths = torch.tensor([medium.data.shape[1] for medium in media], device=self.device)
        features = torch.cat([medium.data.to(device=self.device) for medium in media], dim=1)
        tower = self._net.audio_tower
        after_conv, counts = tower._get_feat_extract_output_lengths(lengths)
        rows = tower(features, feature_lens=lengths, aftercnn_lens=after_conv).last_hidden_state
        return [own.clone() for own in rows.split(counts.tolist())]


def _payload(medium: Medium | None, rows: dict[tuple[str, bytes], torch.Tensor]) -> Payload:
    if medium is None:
        return {"media": []}
    return {"media": [{"kind": medium.kind, "hash": medium.hash, "embeds": rows[medium.kind, medium.hash]}]}


def _patch_values(vision: Qwen2_5OmniVisionEncoderConfig) -> int:
    """Values of one patch: channels × frames × height × width."""
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
