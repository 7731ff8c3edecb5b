"""The input stage: one to three prompts as token ids of three text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.models.images.stable_diffusion_3.graph import reads_with_t5, sizes
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules, images_at
from segue.models.shared.diffusion.library import VaeImageProcessor
from segue.models.shared.diffusion.loading import component_config, load_tokenizer, pipeline_index
from segue.models.shared.diffusion.prompts import clip_length, padded_ids, prompt_tokens
from segue.models.shared.diffusion.sizes import pixels_per_latent

_PROMPTS = ("prompt_2", "prompt_3", "negative_prompt", "negative_prompt_2", "negative_prompt_3")

_FROM_IMAGE = DiffusionParams(strength=0.6, num_inference_steps=50)
"""Defaults of the image-to-image pipelines, with and without a mask."""


class Input(DiffusionInput):
    """`ModuleModel`. An item for the text encoders: `{"clip": [ids, ids], "t5": ids}`."""

    def __init__(self, ctx: LoadContext) -> None:
        transformer = component_config(ctx.model_dir, "transformer")
        scale = pixels_per_latent(ctx.model_dir)
        size = transformer.get("sample_size", 128) * scale
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(
                    height=size, width=size, num_inference_steps=28, guidance_scale=7.0, max_sequence_length=256
                ),
                takes=frozenset((*_PROMPTS, "guidance_scale", "sigmas", "max_sequence_length", "strength")),
                sizes=sizes(pipeline_index(ctx.model_dir), ctx.model_dir),
                max_sequence_length=512,
                images=(0, 1),
                with_image=_FROM_IMAGE,
                with_mask=_FROM_IMAGE,
                mask_scale=scale,
            ),
        )
        self._images = VaeImageProcessor(vae_scale_factor=scale)
        self._clips = [load_tokenizer(ctx.model_dir, name) for name in ("tokenizer", "tokenizer_2")]
        has_t5 = reads_with_t5(pipeline_index(ctx.model_dir))
        self._t5 = load_tokenizer(ctx.model_dir, "tokenizer_3") if has_t5 else None

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        items = [self._item(prompt, params.prompt_2, params.prompt_3, params)]
        if (params.guidance_scale or 0) > 1:
            negative = params.negative_prompt or ""
            items.append(self._item(negative, params.negative_prompt_2, params.negative_prompt_3, params))
        return items

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """T5's tokens if there is one, since T5 reads more of the prompt than CLIP; else CLIP's."""
        if self._t5 is not None:
            return prompt_tokens(self._t5, params.prompt_3 or prompt, params.max_sequence_length or 256)
        return prompt_tokens(self._clips[0], prompt, clip_length(self._clips[0]))

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        return images_at(self._images, params, images)

    def _item(self, first: str, second: str | None, third: str | None, params: DiffusionParams) -> dict[str, Any]:
        """The item of a prompt; empty further prompts are replaced by the first."""
        clips = zip(self._clips, (first, second or first), strict=True)
        # as in the pipeline, both have the length of the first tokenizer
        length = clip_length(self._clips[0])
        item: dict[str, Any] = {"clip": [padded_ids(tokenizer, text, length) for tokenizer, text in clips]}
        if self._t5 is not None:
            item["t5"] = padded_ids(self._t5, third or first, params.max_sequence_length or 256)
        return item
