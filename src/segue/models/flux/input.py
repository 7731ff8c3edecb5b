"""The input stage: prompts as the token ids of two text encoders, a picture in the size the network sees it in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError
from segue.models.diffusion.input import DiffusionInput, Picture, Rules, negative_of
from segue.models.diffusion.kl import pixels_per_latent
from segue.models.diffusion.library import VaeImageProcessor
from segue.models.diffusion.loading import load_tokenizer, pipeline_index
from segue.models.diffusion.prompts import clip_length, padded_ids, prompt_tokens
from segue.models.flux.sizes import adjusted, preferred

KONTEXT = "FluxKontextPipeline"
_LATENTS = 128
"""Height and width of the latents by default."""
_FROM_PICTURE = DiffusionParams(strength=0.6, guidance_scale=7.0)
"""What the pipelines that begin with a picture take by default, with a mask and without."""
_TAKES = frozenset(
    ("prompt_2", "negative_prompt", "negative_prompt_2", "true_cfg_scale", "guidance_scale", "sigmas",
     "max_sequence_length")
)  # fmt: skip


class Input(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoders: `{"clip": [ids], "t5": ids}`; `pictures`: [3, H, W] each.

    Option `auto_resize` (true): Kontext sees a picture in the nearest of the sizes it was trained with; else as it is.
    """

    def __init__(self, ctx: LoadContext) -> None:
        self._edits = pipeline_index(ctx.model_dir).get("_class_name") == KONTEXT
        scale = pixels_per_latent(ctx.model_dir)
        size = _LATENTS * scale
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(
                    height=size,
                    width=size,
                    num_inference_steps=28,
                    true_cfg_scale=1.0,
                    guidance_scale=3.5,
                    max_sequence_length=512,
                ),
                takes=_TAKES | {"max_area" if self._edits else "strength"},
                multiple=2 * scale,
                max_sequence_length=512,
                pictures=(0, 1),
                with_picture=None if self._edits else _FROM_PICTURE,
                with_mask=None if self._edits else _FROM_PICTURE,
                mask_scale=scale,
            ),
        )
        self._clip = load_tokenizer(ctx.model_dir, "tokenizer")
        self._t5 = load_tokenizer(ctx.model_dir, "tokenizer_2")
        self._pictures = VaeImageProcessor(vae_scale_factor=2 * scale)
        self._auto_resize = ctx.options.get("auto_resize", True)
        if not isinstance(self._auto_resize, bool):
            raise ConfigError(f"auto_resize is {self._auto_resize!r}; it must be true or false", field="auto_resize")

    def completed(self, params: DiffusionParams, pictures: Sequence[Picture]) -> DiffusionParams:
        params = super().completed(params, pictures)
        if not self._edits:
            return params
        height, width = adjusted(params.height or 0, params.width or 0, params.max_area, self.rules.multiple)
        return msgspec.structs.replace(params, height=height, width=width)

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        items = [self._item(prompt, params.prompt_2, params)]
        if (negative := negative_of(params)) is not None:
            items.append(self._item(negative, params.negative_prompt_2, params))
        return items

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """T5's, which reads more of it than CLIP."""
        return prompt_tokens(self._t5, params.prompt_2 or prompt, params.max_sequence_length or 512)

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        if not pictures:
            return {}
        image = pictures[0].image
        if not self._edits:
            height, width = params.height, params.width
        elif self._auto_resize:
            height, width = preferred(image.height, image.width, self.rules.multiple)
        else:
            multiple = self.rules.multiple
            height, width = image.height // multiple * multiple, image.width // multiple * multiple
        return {"pictures": [self._pictures.preprocess(image, height=height, width=width)[0]]}

    def _item(self, first: str, second: str | None, params: DiffusionParams) -> dict[str, Any]:
        """An empty second prompt is as the first."""
        return {
            "clip": [padded_ids(self._clip, first, clip_length(self._clip))],
            "t5": padded_ids(self._t5, second or first, params.max_sequence_length or 512),
        }
