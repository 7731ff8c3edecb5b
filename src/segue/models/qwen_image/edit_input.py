"""The input stage of the pipelines that edit: pictures as the text encoder sees them, and as the VAE does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge
from segue.models.diffusion.input import DiffusionInput, Picture, Rules, negative_of
from segue.models.diffusion.loading import component_config, load_processor, pipeline_index
from segue.models.qwen_image.graph import EDITING, PLACES, sizes
from segue.models.qwen_image.input import Input, check_undistilled

_HEAD = (
    "<|im_start|>system\n"
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n"
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"
_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
DROP = 64
"""Tokens of the template before the user's, whose hidden states are left out, as the library's pipelines have it."""
SEEN_AREA = 384 * 384
"""Pixels of a picture as the text encoder of the pipeline for several sees it; that for one sees `AREA`."""
AREA = 1024 * 1024
"""Pixels of a picture as the VAE sees it, and of what is made by default."""
_SIDE = 32
"""Sides of pictures are multiples of this many pixels."""
MOST_ASPECT = 200
"""Times that one side of a picture may be the other; the library's processor takes no more."""
MOST_PICTURES = 8
LONGEST = 4096
"""Tokens of a prompt, pictures not counted."""


def input_stage(ctx: LoadContext) -> DiffusionInput:
    """That of the checkpoint's pipeline."""
    return EditInput(ctx) if pipeline_index(ctx.model_dir).get("_class_name") in EDITING else Input(ctx)


class EditInput(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoder: `{"ids": [int, …], "drop": int, "most": int, "pixels": tensor,
    "grid": tensor}`, the last two as the library's processor makes them."""

    def __init__(self, ctx: LoadContext) -> None:
        check_undistilled(ctx.model_dir)
        self._several = pipeline_index(ctx.model_dir).get("_class_name") == "QwenImageEditPlusPipeline"
        made = sizes(pipeline_index(ctx.model_dir), ctx.model_dir)
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(num_inference_steps=50, true_cfg_scale=4.0),
                takes=frozenset(
                    {"negative_prompt", "true_cfg_scale", "sigmas"} | (set() if self._several else {"strength"})
                ),
                sizes=made,
                pictures=(1, MOST_PICTURES if self._several else 1),
                with_mask=None if self._several else DiffusionParams(strength=0.6),
                mask_scale=made.multiple // 2,
            ),
        )
        self._processor = load_processor(ctx.model_dir)
        self._images = VaeImageProcessor(vae_scale_factor=made.multiple)
        self._pad: int = component_config(ctx.model_dir, "text_encoder")["image_token_id"]

    def warm_up(self) -> None:
        """There is nothing to be done without a picture."""

    def completed(self, params: DiffusionParams, pictures: Sequence[Picture]) -> DiffusionParams:
        height, width = sides(pictures[-1].image, AREA)
        opened = {"height": params.height or height, "width": params.width or width}
        return super().completed(msgspec.structs.replace(params, **opened), pictures)

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        area = SEEN_AREA if self._several else AREA
        seen = [self._images.resize(one.image, *seen_sides(one.image, area)) for one in pictures]
        prompts = [prompt]
        if (negative := negative_of(params)) is not None:
            prompts.append(negative)
        items = [self._item(text, seen) for text in prompts]
        self._check_places(params, pictures, max(len(item["ids"]) for item in items) - DROP)
        return items

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """Without those that stand for a picture."""
        return sum(token != self._pad for token in item["ids"]) - item["drop"]

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        made = []
        for one in pictures:
            height, width = sides(one.image, AREA)
            if params.strength is not None and params.height and params.width:  # a mask keeps some of it
                height, width = params.height, params.width
            # the pipeline for one picture resizes it for both at once; the second time changes nothing
            made.append(self._images.preprocess(one.image, height, width)[0])
        return {"pictures": made}

    def _check_places(self, params: DiffusionParams, pictures: Sequence[Picture], text: int) -> None:
        """`text`: tokens of the longest prompt, pictures counted. Raises `TooLarge`."""
        height, width = params.height or 0, params.width or 0
        longest = max(height, width, *(max(sides(one.image, AREA)) for one in pictures))
        if text + longest // self.rules.sizes.multiple // 2 > PLACES:
            fits = max(0, 2 * (PLACES - text)) * self.rules.sizes.multiple
            raise TooLarge(
                f"height {height} x width {width}, a prompt and pictures of {text} tokens: with so many, a side has at "
                f"most {fits} pixels, also that of a picture at {AREA} pixels: ask for a smaller size, or write less",
                field="height" if height >= width else "width",
            )

    def _item(self, prompt: str, seen: Sequence[Image.Image]) -> dict[str, Any]:
        if _PICTURE in prompt or "<|image_pad|>" in prompt:
            raise InvalidRequest("the prompt holds a placeholder for pictures", field="prompt")
        before = "".join(f"Picture {number}: {_PICTURE}" for number in range(1, len(seen) + 1))
        text = _HEAD + (before if self._several else _PICTURE) + prompt + _TAIL
        made = self._processor(text=[text], images=list(seen), return_tensors="pt")
        ids = made["input_ids"][0].tolist()
        words = sum(token != self._pad for token in ids)
        if words > LONGEST:
            raise InvalidRequest(f"the prompt has {words} tokens; at most {LONGEST}", field="prompt")
        return {
            "ids": ids,
            "drop": DROP,
            "most": len(ids),
            "pixels": made["pixel_values"],
            "grid": made["image_grid_thw"],
        }


def seen_sides(image: Image.Image, area: int) -> tuple[int, int]:
    """As `sides`, of a picture for the text encoder. Raises `InvalidRequest`."""
    height, width = sides(image, area)
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise InvalidRequest(
            f"image is {image.width} x {image.height}; one side must be less than {MOST_ASPECT} times the other",
            field="image",
        )
    return height, width


def sides(image: Image.Image, area: int) -> tuple[int, int]:
    """Height and width of about so many pixels in a picture's proportions. Raises `InvalidRequest`."""
    ratio = image.width / image.height
    width = (area * ratio) ** 0.5
    height, width = round(width / ratio / _SIDE) * _SIDE, round(width / _SIDE) * _SIDE
    if min(height, width) < _SIDE:
        raise InvalidRequest(
            f"image is {image.width} x {image.height}; one side is too short for {area} pixels in its proportions",
            field="image",
        )
    return height, width
