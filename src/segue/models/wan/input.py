"""The input stage: prompts as token ids, pictures at the size of the video and as CLIP takes them."""

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
from segue.models.diffusion.input import DiffusionInput, Picture, Rules
from segue.models.diffusion.loading import component_class, load_tokenizer, pipeline_index
from segue.models.wan.graph import sizes
from segue.models.wan.library import prompt_clean
from segue.models.wan.shape import TEXT_TOKENS, Shape

FPS, FPS_TI2V = 16.0, 24.0
"""What the checkpoints were trained at."""
_LAST = "last_image"


class Input(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoder: `{"ids": [int, …]}`; for the VAE's encoder: `{"first": uint8
    [h, w, 3], "last": uint8 [h, w, 3] or None, "frames": int}`; for CLIP: `{"pixels": float32 [pictures, 3, h, w]}`."""

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
                pictures=shape.pictures,
                roles=frozenset({_LAST} if shape.pictures[1] > 1 else ()),
            ),
        )
        self._tokenizer = load_tokenizer(ctx.model_dir)
        self._clip = _image_processor(ctx.model_dir) if shape.looks else None

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        if self._shape.looks and params.max_sequence_length != TEXT_TOKENS:
            raise InvalidRequest(
                f"max_sequence_length is {params.max_sequence_length}; this model reads {TEXT_TOKENS} tokens, no fewer",
                field="max_sequence_length",
            )
        prompts = [prompt]
        if (params.guidance_scale or 0) > 1:
            prompts.append(params.negative_prompt or "")
        return [self._item(text, params) for text in prompts]

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return len(item["ids"])

    def _tokens(self, picture: Any) -> int:
        """Of a picture, or of two: each as large as a frame."""
        of_frame = super()._tokens(picture["first"].movedim(-1, 0))
        return of_frame * (1 if picture["last"] is None else 2)

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        first = [picture.image for picture in pictures if not picture.role]
        last = [picture.image for picture in pictures if picture.role == _LAST]
        self._check_roles(params, pictures, len(first), len(last))
        if not first:
            return {}
        whole = not self._shape.timestep_per_token
        condition = {
            "first": _sized(first[0], params),
            "last": _sized(last[0], params) if last else None,
            "frames": params.num_frames if whole else 1,
        }
        made: Payload = {"pictures": [condition]}
        if self._clip is not None:
            pixels = self._clip(images=[*first, *last], return_tensors="pt")["pixel_values"]
            made["looks"] = [{"pixels": pixels}]
        return made

    def _check_roles(self, params: DiffusionParams, pictures: Sequence[Picture], first: int, last: int) -> None:
        _, most = self.rules.pictures
        if pictures and first != 1:
            right = "one as image" + (" and the one to end with as last_image" if most > 1 else "")
            raise InvalidRequest(
                f"the request has {first} pictures to begin with; send {right}", field="image" if first else _LAST
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
    """uint8 [height, width, 3], resampled as the library's pipeline does it."""
    assert params.height is not None
    assert params.width is not None
    resized = image.resize((params.width, params.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(resized))


def _image_processor(model_dir: Path) -> Any:
    """What makes a picture into what CLIP takes. Raises `ConfigError` naming the folder."""
    directory = model_dir / "image_processor"
    try:
        return component_class(model_dir, "image_processor").from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{directory}: the image processor cannot be loaded: {error}", field="model") from error
