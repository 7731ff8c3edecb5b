"""The decoder of the VAE, which is causal: frames are sent as they are decoded, one latent at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload
from segue.engines.module.contract import Result, Work
from segue.kernels.device import give_back_on, out_of_memory
from segue.models.images.wan.library import WanCausalConv3d, unpatchify
from segue.models.shared.diffusion.vae import Decoder, levels


@dataclass(slots=True)
class _Video:
    """A video that is being decoded."""

    index: int
    fps: float
    latents: torch.Tensor
    """[1, channels, frames, h, w], in the VAE's scaling."""
    kept: list[Any]
    """By causal convolution, in execution order: the past frames that it needs (the library's `feat_cache`)."""
    done: int = 0
    """Number of latents decoded."""
    frames: int = 0
    """Number of frames sent."""


@dataclass(slots=True)
class _Next:
    """A work item: the next latent of a video."""

    video: _Video


class WanDecoder(Decoder):
    """`ModuleModel`; latents are [1, channels, frames, h, w], normalised by channel. The first one is one frame, the
    others are four each. Videos larger than `tile_pixels` are decoded at once, in tiles."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        config = self.vae.config
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, device=self.device, dtype=self.dtype).reshape(shape)
        self._std = torch.tensor(config.latents_std, device=self.device, dtype=self.dtype).reshape(shape)
        self._convolutions = sum(isinstance(module, WanCausalConv3d) for module in self.vae.decoder.modules())

    @property
    def scale(self) -> int:
        return int(self.vae.config.scale_factor_spatial)

    def warm_up(self) -> None:
        self.pixels(torch.zeros(1, self.vae.config.z_dim, 2, 8, 8))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        [frames] = self.vae.decode(latents * self._std + self._mean, return_dict=False)
        return frames

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        works = []
        for work in super().feed(state, upstream, payload, final=final):
            works += self._in_pieces(work)
        return works

    def _in_pieces(self, work: Work) -> list[Work]:
        """Split a video's work into items, one per latent."""
        payload = work.item
        if payload is None or payload.get("partial") is not None or self.tiled(payload["latents"]):
            return [work]
        latents = payload["latents"].to(self.device, self.dtype) * self._std + self._mean
        video = _Video(payload["index"], payload["fps"], latents, [None] * self._convolutions)
        count = latents.shape[2]
        # one bucket per video: the frames of one video fill a device
        bucket, cost = (work.request_id, video.index, "frames"), max(1, work.cost // count)
        pieces = [Work(work.request_id, _Next(video), bucket, cost) for _ in range(count)]
        pieces[-1].last = work.last
        return pieces

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        if isinstance(works[0].item, _Next):
            return [Result(self._frames(work.item.video)) for work in works]
        return super().run(works)

    def _frames(self, video: _Video) -> Payload:
        place = video.done
        frames = self._decoded(video)
        if self.vae.config.patch_size is not None:
            frames = unpatchify(frames, patch_size=self.vae.config.patch_size)
        first, count = video.frames, frames.shape[2]
        video.done, video.frames = place + 1, first + count
        if video.done == video.latents.shape[2]:
            video.kept.clear()
        shades = levels((frames[0].float() / 2 + 0.5).clamp(0, 1), video.index)
        return {"video": shades.permute(1, 2, 3, 0), "index": video.index, "fps": video.fps, "first": first}

    def _decoded(self, video: _Video) -> torch.Tensor:
        """The frames of the next latent. After running out of memory it frees cached memory and retries once. Raises
        `StageFailed`."""
        place = video.done
        piece = video.latents[:, :, place : place + 1]
        for _ in range(2):
            kept = list(video.kept)
            try:
                made = self.vae.decoder(
                    self.vae.post_quant_conv(piece), feat_cache=kept, feat_idx=[0], first_chunk=place == 0
                )
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            else:
                assert isinstance(made, torch.Tensor)
                video.kept[:] = kept
                self.note(piece)
                return made
            give_back_on(self.device)
        raise self.too_large(piece)
