"""The vision encoder as a stage of its own: one work item per image, equal images once.

n patches of an image, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.kernels.prepare import Plan, prepare
from segue.messages.errors import StageFailed
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.loading import load_vision
from segue.models.omni.bagel.vision import places
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes

_PATCHES = 256
"""Typical number of rows per call; CPU linear layers choose their weight layout for it."""


@dataclass(frozen=True, slots=True)
class _Image:
    hash: bytes
    patches: torch.Tensor
    """[n, channels · size²]."""
    grid: tuple[int, int]
    """Patches down and across."""


class Encoder:
    """`ModuleModel`: images → their rows.

    Options: `cache_bytes`, for results that are kept.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint."""
        config = read_config(ctx.model_dir)
        self._vit = config.vit
        self._net = load_vision(ctx, config)
        prepare(self._net, ctx.device, Plan(rows=_PATCHES))
        self._device, self._dtype = ctx.device, ctx.dtype
        self.cache = EncoderCache(cache_bytes(ctx))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encode a small image, bypassing the cache."""
        self._encode([_Image(b"", torch.zeros(4, self._values), (2, 2))])

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's chunk → one work item per image, in order. Raises `StageFailed` for impossible shapes."""
        works = [self._work(state, self._image(item)) for item in payload["media"]]
        if final:
            if not works:
                works = [Work(state, None, bucket="none")]
            works[-1].last = True
        return works

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Encode images of one shape in one call; equal images, and those in the cache, only once."""
        images = {("image", image.hash): image for work in works if (image := work.item) is not None}
        rows = self.cache.through(images, self._encode)
        return [Result(_payload(work.item, rows)) for work in works]

    def end(self, state: str) -> None:
        """Nothing to free: no state is kept per request."""

    @property
    def _values(self) -> int:
        return self._vit.num_channels * self._vit.patch_size**2

    def _image(self, item: Payload) -> _Image:
        down, across = item["grid"]
        image = _Image(item["hash"], item["patches"], (int(down), int(across)))
        if list(image.patches.shape) != [down * across, self._values] or min(down, across) < 1:
            raise StageFailed(
                f"an image of {down} × {across} patches has shape {list(image.patches.shape)}; "
                f"[{down * across}, {self._values}] is right"
            )
        if max(down, across) > self._vit.side:
            raise StageFailed(f"an image has {down} × {across} patches; at most {self._vit.side} per side are right")
        return image

    def _work(self, request_id: str, image: _Image) -> Work:
        known = ("image", image.hash) in self.cache
        return Work(request_id, image, bucket=image.grid, cost=1 if known else len(image.patches), ordered=False)

    def _encode(self, images: Sequence[_Image]) -> list[torch.Tensor]:
        """Images of one shape → [n, H] each."""
        at = places(*images[0].grid, self._vit.side).to(self._device)
        patches = torch.stack([image.patches for image in images]).to(self._device, self._dtype)
        return [rows.clone() for rows in self._net(patches, at)]  # the cache keeps rows that own their memory


def _payload(image: _Image | None, rows: dict[tuple[str, bytes], torch.Tensor]) -> Payload:
    if image is None:
        return {"media": []}
    return {"media": [{"hash": image.hash, "rows": rows["image", image.hash]}]}
