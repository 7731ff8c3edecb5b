"""A VAE's decoder and encoder as stages of their own. The decoder turns latents of many requests into images or frames;
the encoder encodes images of many requests in one call, each once. Includes Stable Diffusion's image VAE (diffusers'
`AutoencoderKL`), whose latents are scaled and shifted as a whole."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.kernels.device import give_back_on, out_of_memory
from segue.messages.errors import ConfigError, StageFailed
from segue.models.shared.diffusion.loading import load_component
from segue.models.shared.diffusion.text_encoder import TextEncoder


class ImageEncoder(TextEncoder):
    """`ModuleModel`: `{"images": [tensor, …]}` in, `{"images": [{name: tensor}, …]}` out, final; cached like texts."""

    key: ClassVar[str] = "images"
    names: ClassVar[tuple[str, ...]] = ("latents",)

    @abstractmethod
    def encode_alike(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run one call of the network over images of one shape, [B, …]; returns [B, …] by name."""

    def bucket(self, items: Sequence[Any]) -> Hashable:
        return tuple(sorted({tuple(item.shape) for item in items}))

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        made: dict[int, dict[str, torch.Tensor]] = {}
        for shape in dict.fromkeys(item.shape for item in items):
            places = [place for place, item in enumerate(items) if item.shape == shape]
            found = self.encode_alike(torch.stack([items[place] for place in places]).to(self.device))
            for row, place in enumerate(places):
                made[place] = {name: found[name][row] for name in self.names}
        return [made[place] for place in range(len(items))]


log = logging.getLogger(__name__)

TILE_PIXELS = 2_097_152
"""Larger images are decoded in blended tiles (diffusers' `enable_tiling`): a small difference, much less memory. Option
`tile_pixels`."""
DEFAULT_FPS = 16.0


@dataclass(slots=True)
class _State:
    request_id: str
    seen: set[tuple[int, int | None]] = field(default_factory=set)
    """(index, partial) of received latents: a restarted denoiser sends them again, in any order."""


class Decoder(ABC):
    """`ModuleModel`: `{"latents": [1, …], "index", "partial"}` per chunk in, `image` or `video` payloads out."""

    component: ClassVar[str] = "vae"
    call_pixels: ClassVar[int] = 4_194_304
    """Maximum pixels of one call, over all images or frames; more are decoded in several calls."""

    def __init__(self, ctx: LoadContext, *, dtype: torch.dtype | None = None) -> None:
        self.device = ctx.device
        self.dtype = ctx.dtype if dtype is None else dtype
        self.vae = self.load(replace(ctx, dtype=self.dtype), self.component)
        self._largest = (0, 0)
        """Height and width of the largest output so far."""
        self._tile_pixels = ctx.options.get("tile_pixels", TILE_PIXELS)
        if not isinstance(self._tile_pixels, int) or self._tile_pixels < 1:
            raise ConfigError(f"tile_pixels is {self._tile_pixels!r}; it must be a number of pixels")

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, channels, (frames,) h, w] → [B, 3, (frames,) H, W], mostly in [-1, 1]. Takes the denoiser's latents and
        applies the VAE's own scaling and shifting."""

    @property
    @abstractmethod
    def scale(self) -> int:
        """Pixels per latent, in height and in width."""

    def load(self, ctx: LoadContext, component: str) -> Any:
        """Load the network: the library's; a family whose network is in no library uses `load_own`."""
        return load_component(ctx, component)

    def tile(self, tiled: bool) -> None:
        """Switch the network's tiled decoding on or off."""
        if tiled:
            self.vae.enable_tiling()
        else:
            self.vae.disable_tiling()

    @torch.inference_mode()
    def pixels(self, latents: torch.Tensor, *, tiled: bool = False) -> torch.Tensor:
        """[B, channels, (frames,) h, w] → [B, (frames,) H, W, 3] float32 in [0, 1]; `tiled`: use tiles at any size."""
        self.tile(tiled or self.tiled(latents))
        frames = latents.shape[2] if latents.ndim == 5 else 1
        at_once = max(1, self.call_pixels // (self._area(latents) * frames))
        decoded = torch.cat([self.decode(part) for part in latents.to(self.device, self.dtype).split(at_once)])
        return (decoded.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)

    def tiled(self, latents: torch.Tensor) -> bool:
        """Whether the output is so large that it is decoded in tiles."""
        return self._area(latents) > self._tile_pixels

    def _area(self, latents: torch.Tensor) -> int:
        """Pixels of one image or frame."""
        return latents.shape[-1] * latents.shape[-2] * self.scale**2

    def warm_up(self) -> None:
        """Does nothing by default: only families know a small latent."""

    def begin(self, request: StageRequest) -> tuple[_State, list[Work]]:
        return _State(request.request_id), []

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        works = []
        if payload and (place := (payload["index"], payload.get("partial"))) not in state.seen:
            state.seen.add(place)
            latents = payload["latents"]
            bucket = (tuple(latents.shape), payload.get("partial") is None)
            works.append(Work(state.request_id, payload, bucket, cost=latents[0, 0].numel(), ordered=False))
        if final:
            if not works:
                works.append(Work(state.request_id, None, "none"))
            works[-1].last = True
        return works

    def run(self, works: list[Work]) -> list[Result]:
        payloads: list[Any] = [work.item for work in works]
        if payloads[0] is None:
            return [Result() for _ in works]
        latents = torch.cat([payload["latents"] for payload in payloads])
        try:
            decoded = self.pixels(latents)
        except (RuntimeError, MemoryError) as error:
            if len(works) > 1 or not out_of_memory(error):  # otherwise the engine runs them one by one
                raise
            reason = str(error).partition("\n")[0]
        else:
            reason = ""
        if reason:
            decoded = self._with_less(latents, reason)
        self.note(latents)
        return [
            Result(_shown(payload, levels(pixels, payload["index"])))
            for payload, pixels in zip(payloads, decoded, strict=True)
        ]

    def _with_less(self, latents: torch.Tensor, reason: str) -> torch.Tensor:
        """Decode one output in tiles after `pixels` ran out of memory. Raises `StageFailed` if memory is still too
        small."""
        give_back_on(self.device)
        height, width = self._sides(latents)
        log.warning("not enough memory to decode %d x %d at once (%s): decoding in tiles", height, width, reason)
        try:
            return self.pixels(latents, tiled=True)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        give_back_on(self.device)
        raise self.too_large(latents)

    def note(self, latents: torch.Tensor) -> None:
        """Record the size of decoded latents."""
        self._largest = max(self._largest, self._sides(latents), key=lambda sides: sides[0] * sides[1])

    def too_large(self, latents: torch.Tensor) -> StageFailed:
        """The error for latents that do not fit into memory."""
        height, width = self._sides(latents)
        most = self._largest
        known = f"; the largest that fitted was {most[0]} x {most[1]}" if 0 < most[0] * most[1] < height * width else ""
        return StageFailed(
            f"height {height} x width {width} does not fit into the free memory; ask for a smaller size{known}"
        )

    def _sides(self, latents: torch.Tensor) -> tuple[int, int]:
        """Height and width of the output in pixels."""
        return latents.shape[-2] * self.scale, latents.shape[-1] * self.scale

    def end(self, state: _State) -> None:
        """Nothing to free: only the state itself is kept."""


def levels(pixels: torch.Tensor, index: int) -> torch.Tensor:
    """Numbers in [0, 1] as uint8. Raises `StageFailed` for NaN, so that the client gets an error and not a black image.
    `index`: of the output."""
    if not pixels.is_meta and pixels.isnan().any():  # meta tensors, used to trace shapes, have no values
        raise StageFailed(
            f"output {index} contains NaN: the request's settings (guidance, noise levels) or the model's "
            "dtype cause an overflow"
        )
    return (pixels * 255).round().to(torch.uint8)


def _shown(payload: Payload, pixels: torch.Tensor) -> Payload:
    """[h, w, 3] or [frames, h, w, 3] uint8 → the client's payload."""
    if payload.get("partial") is not None:
        frame = pixels if pixels.ndim == 3 else pixels[0]
        return {"image": frame, "index": payload["index"], "partial": payload["partial"]}
    if pixels.ndim == 3:
        return {"image": pixels, "index": payload["index"], "latent_tokens": payload.get("latent_tokens", 0)}
    return {"video": pixels, "index": payload["index"], "fps": payload.get("fps", DEFAULT_FPS), "first": 0}


class KLDecoder(Decoder):
    """`ModuleModel`; latents are [B, channels, h, w]."""

    @property
    def scale(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        config = self.vae.config
        [images] = self.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0), return_dict=False)
        assert isinstance(images, torch.Tensor)
        return images


class KLEncoder(ImageEncoder):
    """`ModuleModel`: [3, H, W] in [-1, 1] → the distribution of its latents in the denoiser's scaling: `mean` and
    `std`, [channels, h, w] each."""

    names = ("mean", "std")

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        self.vae = self.load(ctx)

    def load(self, ctx: LoadContext) -> Any:
        """Load the network: the library's."""
        return load_component(ctx, "vae")

    def encode_alike(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        config = self.vae.config
        [seen] = self.vae.encode(images.to(self.dtype), return_dict=False)
        shift = config.shift_factor or 0.0
        return {"mean": (seen.mean - shift) * config.scaling_factor, "std": seen.std * config.scaling_factor}
