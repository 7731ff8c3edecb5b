"""The input stage: prompts as ids of both text encoders, and an optional input image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from diffusers.image_processor import VaeImageProcessor

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.models.images.sdxl.graph import sizes
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules, prompt_of
from segue.models.shared.diffusion.loading import component_config, load_tokenizer, pipeline_index
from segue.models.shared.diffusion.prompts import prompt_tokens
from segue.models.shared.diffusion.sizes import pixels_per_latent

TAKES = frozenset(
    ("negative_prompt", "prompt_2", "negative_prompt_2", "guidance_scale", "guidance_rescale", "eta", "clip_skip",
     "original_size", "crops_coords_top_left", "target_size", "negative_original_size",
     "negative_crops_coords_top_left", "negative_target_size", "sigmas", "strength")
)  # fmt: skip
STRENGTH = 0.3
"""Default strength of image to image, as in the library."""
MASKED_STRENGTH = 0.9999
"""Default strength with a mask."""


class Input(DiffusionInput):
    """`ModuleModel`. An item for a text encoder: `{"ids": [int, …], "skip": int}`."""

    def __init__(self, ctx: LoadContext) -> None:
        self._scale = pixels_per_latent(ctx.model_dir)
        unet = component_config(ctx.model_dir, "unet")
        size = unet["sample_size"] * self._scale
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(height=size, width=size, num_inference_steps=50, guidance_scale=5.0),
                takes=TAKES,
                sizes=sizes(pipeline_index(ctx.model_dir), ctx.model_dir),
                images=(0, 1),
                with_image=DiffusionParams(strength=STRENGTH),
                with_mask=DiffusionParams(strength=MASKED_STRENGTH, guidance_scale=7.5, height=size, width=size),
                mask_scale=self._scale,
            ),
        )
        self._tokenizers = [load_tokenizer(ctx.model_dir, name) for name in ("tokenizer", "tokenizer_2")]
        self._layers = min(
            component_config(ctx.model_dir, name)["num_hidden_layers"] for name in ("text_encoder", "text_encoder_2")
        )
        # without a negative prompt, the published checkpoint's unconditional branch is zeros
        self._zeros: bool = pipeline_index(ctx.model_dir).get("force_zeros_for_empty_prompt", True)
        self._images = VaeImageProcessor(vae_scale_factor=self._scale)

    def completed(self, params: DiffusionParams, images: Sequence[InputImage]) -> DiffusionParams:
        if not images:
            return super().completed(params, images)
        [image] = images
        height, width = self._images.get_default_height_width(image.image)
        opened = {
            "height": params.height or max(self._scale, height),
            "width": params.width or max(self._scale, width),
        }
        completed = super().completed(msgspec.structs.replace(params, **opened), images)
        steps = len(completed.sigmas) if completed.sigmas is not None else completed.num_inference_steps or 1
        strength = completed.strength or 0.0
        if int(steps * strength) < 1:
            raise InvalidRequest(
                f"strength is {strength}: that leaves none of {steps} steps; the minimum is {1 / steps:.3g}",
                field="strength",
            )
        return completed

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        return self._items(0, prompt, params.negative_prompt, params)

    def process(self, request: Request) -> Payload:
        payload = super().process(request)
        params = msgspec.convert(payload["settings"], DiffusionParams)
        prompt = params.prompt_2 or prompt_of(request)
        payload["texts_2"] = self._items(1, prompt, params.negative_prompt_2 or params.negative_prompt, params)
        return payload

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return prompt_tokens(self._tokenizers[0], prompt, self._tokenizers[0].model_max_length)

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        if not images:
            return {}
        [image] = images
        return {"images": list(self._images.preprocess(image.image, params.height, params.width))}

    def _items(self, encoder: int, prompt: str, negative: str | None, params: DiffusionParams) -> list[Any]:
        skip = params.clip_skip or 0
        if skip > self._layers - 1:
            raise InvalidRequest(
                f"clip_skip is {skip}; at most {self._layers - 1} layers can be skipped", field="clip_skip"
            )
        items = [{"ids": self._ids(encoder, prompt), "skip": skip}]
        guided = (params.guidance_scale or 0) > 1
        if guided and not (self._zeros and params.negative_prompt is None):
            items.append({"ids": self._ids(encoder, negative or ""), "skip": 0})
        return items

    def _ids(self, encoder: int, text: str) -> list[int]:
        tokenizer = self._tokenizers[encoder]
        longest = tokenizer.model_max_length
        return list(tokenizer(text, padding="max_length", max_length=longest, truncation=True).input_ids)
