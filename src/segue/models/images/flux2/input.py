"""The input stage: a prompt as token ids, and reference images resized for the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from PIL import Image

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import BLOCK_CACHES, TAYLORSEER, DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.models.images.flux2.graph import sizes
from segue.models.images.flux2.prompts import KLEIN, prompts_of
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules
from segue.models.shared.diffusion.library import VaeImageProcessor
from segue.models.shared.diffusion.loading import pipeline_index

AREA = 1024 * 1024
"""Larger images are downscaled to this many pixels."""
SIDE = 1024
"""Default height and width."""
MOST_IMAGES = 10
LONGEST = 512
"""Maximum tokens of a prompt."""
SHORTEST_SIDE = 64
"""Minimum pixels of a reference image's shorter side."""
MOST_ASPECT = 8
"""Maximum ratio of its longer side to its shorter one."""


class Input(DiffusionInput):
    """`ModuleModel`. An item for the text encoder: `segue.models.images.flux2.prompts`; `images`: [3, H, W]
    each."""

    def __init__(self, ctx: LoadContext) -> None:
        index = pipeline_index(ctx.model_dir)
        made = sizes(index, ctx.model_dir)
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(num_inference_steps=50, guidance_scale=4.0, max_sequence_length=LONGEST),
                takes=frozenset({"guidance_scale", "sigmas", "max_sequence_length"}),
                sizes=made,
                max_sequence_length=LONGEST,
                images=(0, MOST_IMAGES),
            ),
        )
        self._guided = index.get("_class_name") == KLEIN and not index.get("is_distilled", False)
        self._prompts = prompts_of(ctx.model_dir)
        self._images = VaeImageProcessor(vae_scale_factor=made.multiple)

    def completed(self, params: DiffusionParams, images: Sequence[InputImage]) -> DiffusionParams:
        """Fill in defaults; without a requested size, the output has the size of the first resized image."""
        if params.step_cache in BLOCK_CACHES:
            raise InvalidRequest(
                f"step_cache is {params.step_cache!r}, but most of this model's blocks join text and image; it "
                f"has {TAYLORSEER}",
                field="step_cache",
            )
        for image in images:
            _check(image.image)
        height, width = self._sides(_shrunk(images[0].image)) if images else (SIDE, SIDE)
        opened = {"height": params.height or height, "width": params.width or width}
        return super().completed(msgspec.structs.replace(params, **opened), images)

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        prompts = [prompt, ""] if self._guided and (params.guidance_scale or 0) > 1 else [prompt]
        return [self._prompts.item(text, params.max_sequence_length or LONGEST) for text in prompts]

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return sum(item["mask"])

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        """Crop images around their centre to sides that the network accepts."""
        made = []
        for one in images:
            image = _shrunk(one.image)
            height, width = self._sides(image)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            made.append(self._images.preprocess(image.crop((left, top, left + width, top + height)), height, width)[0])
        return {"images": made} if made else {}

    def _sides(self, image: Image.Image) -> tuple[int, int]:
        multiple = self.rules.multiple
        return image.height // multiple * multiple, image.width // multiple * multiple


def _check(image: Image.Image) -> None:
    short, long = sorted(image.size)
    if short < SHORTEST_SIDE or long > MOST_ASPECT * short:
        raise InvalidRequest(
            f"image is {image.width} x {image.height}; its sides must have at least {SHORTEST_SIDE} pixels, and one at "
            f"most {MOST_ASPECT} times the other",
            field="image",
        )


def _shrunk(image: Image.Image) -> Image.Image:
    """Downscale an image to at most `AREA` pixels."""
    if image.width * image.height <= AREA:
        return image
    shrink = math.sqrt(AREA / (image.width * image.height))
    size = (int(image.width * shrink), int(image.height * shrink))
    return image.resize(size, Image.Resampling.LANCZOS)
