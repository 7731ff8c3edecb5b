"""The input stage: prompts as token ids, images at the video's size and in CLIP's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.wan.graph import sizes
from segue.models.images.wan.library import prompt_clean
from segue.models.images.wan.shape import TEXT_TOKENS, Shape
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules
from segue.models.shared.diffusion.loading import component_class, load_tokenizer, pipeline_index

FPS, FPS_TI2V = 16.0, 24.0
"""Frame rates of the checkpoints' training."""
_LAST = "last_image"


class Input(DiffusionInput):
    """`ModuleModel`. An item for the text encoder: `{"ids": [int, …]}`; for the VAE's encoder: `{"first": uint8
    [h, w, 3], "last": uint8 [h, w, 3] or None, "frames": int}`; for CLIP: `{"pixels": float32 [images, 3, h, w]}`."""

    def __init__(self, ctx: LoadContext) -> None:
        self._shape = shape = Shape.of(ctx.model_dir)
        takes = {"negative_prompt", "guidance_scale", "num_frames", "fps", "max_sequence_length"}
        if shape.boundary is not None:
            takes.add("guidance_scale_2")
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(
                    height=480,
                    width=832,
                    num_frames=81,
                    num_inference_steps=50,
                    guidance_scale=5.0,
                    max_sequence_length=TEXT_TOKENS,
                    fps=FPS_TI2V if shape.timestep_per_token else FPS,
                ),
                takes=frozenset(takes),
                sizes=sizes(pipeline_index(ctx.model_dir), ctx.model_dir),
                max_sequence_length=TEXT_TOKENS,
                images=shape.images,
                roles=frozenset({_LAST} if shape.images[1] > 1 else ()),
            ),
        )
        self._tokenizer = load_tokenizer(ctx.model_dir)
        self._clip = _image_processor(ctx.model_dir) if shape.looks else None

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        if self._shape.looks and params.max_sequence_length != TEXT_TOKENS:
            raise InvalidRequest(
                f"max_sequence_length is {params.max_sequence_length}; this model needs exactly {TEXT_TOKENS} tokens",
                field="max_sequence_length",
            )
        prompts = [prompt]
        if (params.guidance_scale or 0) > 1:
            prompts.append(params.negative_prompt or "")
        return [self._item(text, params) for text in prompts]

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return len(item["ids"])

    def _tokens(self, image: Any) -> int:
        """Latent tokens of one or two images, each as large as a frame."""
        of_frame = super()._tokens(image["first"].movedim(-1, 0))
        return of_frame * (1 if image["last"] is None else 2)

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        first = [image.image for image in images if not image.role]
        last = [image.image for image in images if image.role == _LAST]
        self._check_roles(params, images, len(first), len(last))
        if not first:
            return {}
        whole = not self._shape.timestep_per_token
        condition = {
            "first": _sized(first[0], params),
            "last": _sized(last[0], params) if last else None,
            "frames": params.num_frames if whole else 1,
        }
        made: Payload = {"images": [condition]}
        if self._clip is not None:
            pixels = self._clip(images=[*first, *last], return_tensors="pt")["pixel_values"]
            made["looks"] = [{"pixels": pixels}]
        return made

    def _check_roles(self, params: DiffusionParams, images: Sequence[InputImage], first: int, last: int) -> None:
        _, most = self.rules.images
        if images and first != 1:
            right = "one as image" + (" and the last frame as last_image" if most > 1 else "")
            raise InvalidRequest(
                f"the request has {first} first images; send {right}", field="image" if first else _LAST
            )
        if last and params.num_frames == 1:
            raise InvalidRequest(
                f"num_frames is 1; a video from image to last_image has at least {self._shape.scale[0] + 1}",
                field="num_frames",
            )

    def _item(self, prompt: str, params: DiffusionParams) -> dict[str, Any]:
        longest = params.max_sequence_length
        return {"ids": self._tokenizer(prompt_clean(prompt), max_length=longest, truncation=True).input_ids}


def _sized(image: Image.Image, params: DiffusionParams) -> torch.Tensor:
    """uint8 [height, width, 3], resampled like the library's pipeline."""
    assert params.height is not None
    assert params.width is not None
    resized = image.resize((params.width, params.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(resized))


def _image_processor(model_dir: Path) -> Any:
    """The processor that converts images for CLIP. Raises `ConfigError` with the folder's name."""
    directory = model_dir / "image_processor"
    try:
        return component_class(model_dir, "image_processor").from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{directory}: the image processor cannot be loaded: {error}", field="model") from error
