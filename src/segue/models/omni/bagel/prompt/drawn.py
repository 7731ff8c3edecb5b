"""An image of the reply, on its way back: it is read as if it had been sent, by the networks that read those that were.

The file's levels count, so what the client gets and sends in a later request is what was read here.
"""

from __future__ import annotations

from typing import cast

from PIL import Image

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.models.omni.bagel.config import Config, read_config
from segue.models.omni.bagel.drawing.vae import LatentEncoder
from segue.models.omni.bagel.encoder import Encoder
from segue.models.omni.bagel.prompt.images import edited, exact, seen


class DrawnEncoder:
    """`ModuleModel`: an image [h, w, 3] uint8 → its rows, by the vision tower of `encoder`."""

    def __init__(self, ctx: LoadContext) -> None:
        self._config = read_config(ctx.model_dir)
        self._encoder = cast(Encoder, ctx.same_worker.models["encoder"])
        self.run, self.end = self._encoder.run, self._encoder.end

    def warm_up(self) -> None:
        """Nothing: its networks are warm."""

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return self._encoder.begin(request)

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The image → a work item. A chunk without one is the end of the stream."""
        media = [seen(_image(payload, self._config), self._config)] if payload else []
        return self._encoder.feed(state, "input", {"media": media}, final=final) if media or final else []


class DrawnLatentEncoder:
    """`ModuleModel`: an image [h, w, 3] uint8 → the distribution of its latents, by the VAE of `vae_encoder`, and what
    determines it."""

    def __init__(self, ctx: LoadContext) -> None:
        self._config = read_config(ctx.model_dir)
        self._encoder = cast(LatentEncoder, ctx.same_worker.models["vae_encoder"])
        self.end = self._encoder.end

    def warm_up(self) -> None:
        """Nothing: its networks are warm."""

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return self._encoder.begin(request)

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The image → a work item. A chunk without one is the end of the stream."""
        if not payload:
            return [Work(state, None, bucket="none", last=True)] if final else []
        image = exact(_image(payload, self._config))
        bucket = tuple(image["pixels"].shape)
        return [Work(state, image, bucket=bucket, last=final, ordered=False)]

    def run(self, works: list[Work]) -> list[Result]:
        if works[0].item is None:
            return [Result() for _ in works]
        asked = [Work(work.request_id, [work.item["pixels"]]) for work in works]
        made = self._encoder.run(asked)
        for work, result in zip(works, made, strict=True):
            assert result.payload is not None
            result.payload["hashes"] = [work.item["latents_hash"]]
        return made


def _image(payload: Payload, config: Config) -> Image.Image:
    return edited(Image.fromarray(payload["image"].cpu().numpy()), config)
