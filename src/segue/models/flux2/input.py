"""The input stage: a prompt as token ids, pictures in the size the network sees them in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from PIL import Image

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import BLOCK_CACHES, TAYLORSEER, DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.models.diffusion.input import DiffusionInput, Picture, Rules
from segue.models.diffusion.library import VaeImageProcessor
from segue.models.diffusion.loading import pipeline_index
from segue.models.flux2.graph import sizes
from segue.models.flux2.prompts import KLEIN, prompts_of

AREA = 1024 * 1024
"""Pixels: larger pictures are seen smaller."""
SIDE = 1024
"""Height and width by default."""
MOST_PICTURES = 10
LONGEST = 512
"""Tokens of a prompt."""
SHORTEST_SIDE = 64
"""Pixels of a picture to work from."""
MOST_ASPECT = 8
"""Its longer side over its shorter one."""


class Input(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoder: `segue.models.flux2.prompts`; `pictures`: [3, H, W] each."""

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
                pictures=(0, MOST_PICTURES),
            ),
        )
        self._guided = index.get("_class_name") == KLEIN and not index.get("is_distilled", False)
        self._prompts = prompts_of(ctx.model_dir)
        self._images = VaeImageProcessor(vae_scale_factor=made.multiple)

    def completed(self, params: DiffusionParams, pictures: Sequence[Picture]) -> DiffusionParams:
        """What is made is as large as the first picture is seen, unless a size is asked for."""
        if params.step_cache in BLOCK_CACHES:
            raise InvalidRequest(
                f"step_cache is {params.step_cache!r}, but most blocks of this model take text and picture as one; it "
                f"has {TAYLORSEER}",
                field="step_cache",
            )
        for picture in pictures:
            _check(picture.image)
        height, width = self._sides(_shrunk(pictures[0].image)) if pictures else (SIDE, SIDE)
        opened = {"height": params.height or height, "width": params.width or width}
        return super().completed(msgspec.structs.replace(params, **opened), pictures)

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        prompts = [prompt, ""] if self._guided and (params.guidance_scale or 0) > 1 else [prompt]
        return [self._prompts.item(text, params.max_sequence_length or LONGEST) for text in prompts]

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return sum(item["mask"])

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        """Pictures are cut around their middle, to sides that the network can see."""
        made = []
        for picture in pictures:
            image = _shrunk(picture.image)
            height, width = self._sides(image)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            made.append(self._images.preprocess(image.crop((left, top, left + width, top + height)), height, width)[0])
        return {"pictures": made} if made else {}

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
    """A picture of at most `AREA` pixels."""
    if image.width * image.height <= AREA:
        return image
    shrink = math.sqrt(AREA / (image.width * image.height))
    size = (int(image.width * shrink), int(image.height * shrink))
    return image.resize(size, Image.Resampling.LANCZOS)
