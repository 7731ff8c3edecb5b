"""The decoder of a VAE as a stage of its own: latents of many requests → pictures or frames."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.kernels.memory import give_back_on, out_of_memory
from segue.messages.errors import ConfigError, StageFailed
from segue.models.diffusion.loading import load_component

log = logging.getLogger(__name__)

TILE_PIXELS = 2_097_152
"""Larger pictures are decoded in tiles that are blended (diffusers' `enable_tiling`): a small difference, much less
memory. Option `tile_pixels`."""
DEFAULT_FPS = 16.0


@dataclass(slots=True)
class _State:
    request_id: str
    seen: set[tuple[int, int | None]] = field(default_factory=set)
    """(index, partial) of what came: a denoiser that runs again sends again, in an order of its own."""


class Decoder(ABC):
    """`ModuleAdapter`: `{"latents": [1, …], "index", "partial"}` per chunk in, `image` or `video` payloads out."""

    component: ClassVar[str] = "vae"
    call_pixels: ClassVar[int] = 4_194_304
    """Pixels of all pictures or frames of one call; more are decoded one after the other."""

    def __init__(self, ctx: LoadContext, *, dtype: torch.dtype | None = None) -> None:
        self.device = ctx.device
        self.dtype = ctx.dtype if dtype is None else dtype
        self.vae = self.load(replace(ctx, dtype=self.dtype), self.component)
        self._largest = (0, 0)
        """Height and width of the largest that was decoded."""
        self._tile_pixels = ctx.options.get("tile_pixels", TILE_PIXELS)
        if not isinstance(self._tile_pixels, int) or self._tile_pixels < 1:
            raise ConfigError(f"tile_pixels is {self._tile_pixels!r}; it must be a number of pixels")

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, channels, (frames,) h, w] → [B, 3, (frames,) H, W], mostly in [-1, 1]; the latents as the network had
        them: scaling and shifting to the VAE's own is done here."""

    @property
    @abstractmethod
    def scale(self) -> int:
        """Pixels per latent, in height and in width."""

    def load(self, ctx: LoadContext, component: str) -> Any:
        """The network with its weights: the library's; one that no library has is read by `load_own`."""
        return load_component(ctx, component)

    def tile(self, tiled: bool) -> None:
        """Have the network decode in tiles from now on, or not."""
        if tiled:
            self.vae.enable_tiling()
        else:
            self.vae.disable_tiling()

    @torch.inference_mode()
    def pixels(self, latents: torch.Tensor, *, tiled: bool = False) -> torch.Tensor:
        """[B, channels, (frames,) h, w] → [B, (frames,) H, W, 3] float32 in [0, 1]; `tiled`: whatever their size."""
        self.tile(tiled or self.tiled(latents))
        frames = latents.shape[2] if latents.ndim == 5 else 1
        at_once = max(1, self.call_pixels // (self._area(latents) * frames))
        decoded = torch.cat([self.decode(part) for part in latents.to(self.device, self.dtype).split(at_once)])
        return (decoded.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)

    def tiled(self, latents: torch.Tensor) -> bool:
        """Whether what these become is so large that it is decoded in tiles."""
        return self._area(latents) > self._tile_pixels

    def _area(self, latents: torch.Tensor) -> int:
        """Pixels of one picture or frame."""
        return latents.shape[-1] * latents.shape[-2] * self.scale**2

    def warm_up(self) -> None:
        """Families that know a small latent may do more."""

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
            if len(works) > 1 or not out_of_memory(error):  # the engine runs them one by one
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
        """`pixels` of one for which there was no memory, in tiles. Raises `StageFailed` where there is none for these
        either."""
        give_back_on(self.device)
        height, width = self._sides(latents)
        log.warning("there is no memory to decode %d x %d at once (%s): it is decoded in tiles", height, width, reason)
        try:
            return self.pixels(latents, tiled=True)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        give_back_on(self.device)
        raise self.too_large(latents)

    def note(self, latents: torch.Tensor) -> None:
        """These were decoded."""
        self._largest = max(self._largest, self._sides(latents), key=lambda sides: sides[0] * sides[1])

    def too_large(self, latents: torch.Tensor) -> StageFailed:
        """There is no memory to decode these."""
        height, width = self._sides(latents)
        most = self._largest
        known = f"; there was memory for {most[0]} x {most[1]}" if 0 < most[0] * most[1] < height * width else ""
        return StageFailed(
            f"height {height} x width {width} cannot be decoded in the memory that is free; ask for a smaller "
            f"size{known}"
        )

    def _sides(self, latents: torch.Tensor) -> tuple[int, int]:
        """Height and width in pixels."""
        return latents.shape[-2] * self.scale, latents.shape[-1] * self.scale

    def end(self, state: _State) -> None:
        """Nothing is kept but the state itself."""


def levels(pixels: torch.Tensor, index: int) -> torch.Tensor:
    """Numbers in [0, 1] as uint8. Raises `StageFailed` where there are none in them: a client that would get a black
    picture is told. `index`: of the output."""
    if not pixels.is_meta and pixels.isnan().any():  # there, where shapes are looked at, are no values
        raise StageFailed(
            f"output {index} has values that are no numbers (NaN): what was asked for (guidance, noise levels) or the "
            "dtype that the model runs in leads out of what numbers can hold"
        )
    return (pixels * 255).round().to(torch.uint8)


def _shown(payload: Payload, pixels: torch.Tensor) -> Payload:
    """[h, w, 3] or [frames, h, w, 3] uint8 → what the client is sent."""
    if payload.get("partial") is not None:
        frame = pixels if pixels.ndim == 3 else pixels[0]
        return {"image": frame, "index": payload["index"], "partial": payload["partial"]}
    if pixels.ndim == 3:
        return {"image": pixels, "index": payload["index"], "latent_tokens": payload.get("latent_tokens", 0)}
    return {"video": pixels, "index": payload["index"], "fps": payload.get("fps", DEFAULT_FPS), "first": 0}
