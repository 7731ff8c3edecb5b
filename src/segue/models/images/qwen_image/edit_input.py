"""The input stage of the editing pipelines: prepares images for the text encoder and for the VAE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge
from segue.models.images.qwen_image.graph import EDITING, PLACES, sizes
from segue.models.images.qwen_image.input import Input, check_undistilled
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules, negative_of
from segue.models.shared.diffusion.loading import component_config, load_processor, pipeline_index

_HEAD = (
    "<|im_start|>system\n"
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n"
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
DROP = 64
"""Leading template tokens, whose hidden states are dropped, as in the library's pipelines."""
SEEN_AREA = 384 * 384
"""Pixels of an image for the text encoder in the pipeline for several images; that for one image uses `AREA`."""
AREA = 1024 * 1024
"""Pixels of an image for the VAE, and of the output by default."""
_SIDE = 32
"""Sides of images are multiples of this many pixels."""
MOST_ASPECT = 200
"""Maximum ratio of an image's sides; the library's processor accepts no more."""
MOST_IMAGES = 8
LONGEST = 4096
"""Maximum tokens of a prompt, without images."""


def input_stage(ctx: LoadContext) -> DiffusionInput:
    """The input stage of the checkpoint's pipeline."""
    return EditInput(ctx) if pipeline_index(ctx.model_dir).get("_class_name") in EDITING else Input(ctx)


class EditInput(DiffusionInput):
    """`ModuleModel`. An item for the text encoder: `{"ids": [int, …], "drop": int, "most": int, "pixels": tensor,
    "grid": tensor}`, the last two from the library's processor."""

    def __init__(self, ctx: LoadContext) -> None:
        check_undistilled(ctx.model_dir)
        self._several = pipeline_index(ctx.model_dir).get("_class_name") == "QwenImageEditPlusPipeline"
        made = sizes(pipeline_index(ctx.model_dir), ctx.model_dir)
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(num_inference_steps=50, true_cfg_scale=4.0),
                # guidance_scale: for distilled checkpoints alone, and ignored for others, as in the library
                takes=frozenset(
                    {"negative_prompt", "true_cfg_scale", "guidance_scale", "sigmas"}
                    | (set() if self._several else {"strength"})
                ),
                sizes=made,
                images=(1, MOST_IMAGES if self._several else 1),
                with_mask=None if self._several else DiffusionParams(strength=0.6),
                mask_scale=made.multiple // 2,
            ),
        )
        self._processor = load_processor(ctx.model_dir)
        self._images = VaeImageProcessor(vae_scale_factor=made.multiple)
        self._pad: int = component_config(ctx.model_dir, "text_encoder")["image_token_id"]

    def warm_up(self) -> None:
        """Does nothing: a request needs an image."""

    def completed(self, params: DiffusionParams, images: Sequence[InputImage]) -> DiffusionParams:
        height, width = sides(images[-1].image, AREA)
        opened = {"height": params.height or height, "width": params.width or width}
        return super().completed(msgspec.structs.replace(params, **opened), images)

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        area = SEEN_AREA if self._several else AREA
        seen = [self._images.resize(one.image, *seen_sides(one.image, area)) for one in images]
        prompts = [prompt]
        if (negative := negative_of(params)) is not None:
            prompts.append(negative)
        items = [self._item(text, seen) for text in prompts]
        self._check_places(params, images, max(len(item["ids"]) for item in items) - DROP)
        return items

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """Tokens of the prompt without image placeholders."""
        return sum(token != self._pad for token in item["ids"]) - item["drop"]

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        made = []
        for one in images:
            height, width = sides(one.image, AREA)
            if params.strength is not None and params.height and params.width:  # a mask keeps a part of the image
                height, width = params.height, params.width
            # the library's pipeline for one image resizes it for both at once; resizing twice changes nothing
            made.append(self._images.preprocess(one.image, height, width)[0])
        return {"images": made}

    def _check_places(self, params: DiffusionParams, images: Sequence[InputImage], text: int) -> None:
        """`text`: tokens of the longest prompt, images included. Raises `TooLarge`."""
        height, width = params.height or 0, params.width or 0
        longest = max(height, width, *(max(sides(one.image, AREA)) for one in images))
        if text + longest // self.rules.sizes.multiple // 2 > PLACES:
            fits = max(0, 2 * (PLACES - text)) * self.rules.sizes.multiple
            raise TooLarge(
                f"height {height} x width {width}: with {text} tokens of prompt and images, no side may exceed {fits} "
                f"pixels, nor one of an input image scaled to {AREA} pixels: ask for a smaller size, or write less",
                field="height" if height >= width else "width",
            )

    def _item(self, prompt: str, seen: Sequence[Image.Image]) -> dict[str, Any]:
        if _IMAGE in prompt or "<|image_pad|>" in prompt:
            raise InvalidRequest("the prompt holds a placeholder for images", field="prompt")
        before = "".join(f"Picture {number}: {_IMAGE}" for number in range(1, len(seen) + 1))
        text = _HEAD + (before if self._several else _IMAGE) + prompt + _TAIL
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
    """As `sides`, for the text encoder's image. Raises `InvalidRequest`."""
    height, width = sides(image, area)
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise InvalidRequest(
            f"image is {image.width} x {image.height}; one side must be less than {MOST_ASPECT} times the other",
            field="image",
        )
    return height, width


def sides(image: Image.Image, area: int) -> tuple[int, int]:
    """Height and width with an image's aspect ratio and about `area` pixels. Raises `InvalidRequest`."""
    ratio = image.width / image.height
    width = (area * ratio) ** 0.5
    height, width = round(width / ratio / _SIDE) * _SIDE, round(width / _SIDE) * _SIDE
    if min(height, width) < _SIDE:
        raise InvalidRequest(
            f"image is {image.width} x {image.height}; one side is too short for {area} pixels at its aspect ratio",
            field="image",
        )
    return height, width
