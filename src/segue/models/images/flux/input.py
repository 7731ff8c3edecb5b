"""The input stage: prompts as token ids of two text encoders, and an input image resized to the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.models.images.flux.graph import sizes_of
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules, images_at, negative_of
from segue.models.shared.diffusion.library import VaeImageProcessor
from segue.models.shared.diffusion.loading import load_tokenizer
from segue.models.shared.diffusion.prompts import clip_length, padded_ids, prompt_tokens
from segue.models.shared.diffusion.sizes import pixels_per_latent

_LATENTS = 128
"""Default height and width of the latents."""
_FROM_IMAGE = DiffusionParams(strength=0.6, guidance_scale=7.0)
"""Defaults of the image-to-image pipelines, with and without a mask."""
_TAKES = frozenset(
    ("prompt_2", "negative_prompt", "negative_prompt_2", "true_cfg_scale", "guidance_scale", "sigmas",
     "max_sequence_length", "strength")
)  # fmt: skip


def rules_of(ctx: LoadContext) -> Rules:
    """The rules of the text-to-image and image-to-image pipelines."""
    scale = pixels_per_latent(ctx.model_dir)
    size = _LATENTS * scale
    return Rules(
        defaults=DiffusionParams(
            height=size,
            width=size,
            num_inference_steps=28,
            true_cfg_scale=1.0,
            guidance_scale=3.5,
            max_sequence_length=512,
        ),
        takes=_TAKES,
        sizes=sizes_of(ctx.model_dir),
        max_sequence_length=512,
        images=(0, 1),
        with_image=_FROM_IMAGE,
        with_mask=_FROM_IMAGE,
        mask_scale=scale,
    )


class Input(DiffusionInput):
    """`ModuleModel`. An item for the text encoders: `{"clip": [ids], "t5": ids}`; `images`: [3, H, W] each."""

    def __init__(self, ctx: LoadContext, rules: Rules | None = None) -> None:
        super().__init__(ctx, rules or rules_of(ctx))
        self._clip = load_tokenizer(ctx.model_dir, "tokenizer")
        self._t5 = load_tokenizer(ctx.model_dir, "tokenizer_2")
        self._images = VaeImageProcessor(vae_scale_factor=self.rules.multiple)

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        items = [self._item(prompt, params.prompt_2, params)]
        if (negative := negative_of(params)) is not None:
            items.append(self._item(negative, params.negative_prompt_2, params))
        return items

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """T5's tokens, since T5 reads more of the prompt than CLIP."""
        return prompt_tokens(self._t5, params.prompt_2 or prompt, params.max_sequence_length or 512)

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        return images_at(self._images, params, images)

    def _item(self, first: str, second: str | None, params: DiffusionParams) -> dict[str, Any]:
        """The item of a prompt; an empty second prompt is replaced by the first."""
        return {
            "clip": [padded_ids(self._clip, first, clip_length(self._clip))],
            "t5": padded_ids(self._t5, second or first, params.max_sequence_length or 512),
        }
