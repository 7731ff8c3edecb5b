"""The input stage: prompts as the token ids of two text encoders, a picture to begin with in the size that is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.models.diffusion.input import DiffusionInput, Picture, Rules, negative_of, pictures_at
from segue.models.diffusion.library import VaeImageProcessor
from segue.models.diffusion.loading import load_tokenizer
from segue.models.diffusion.prompts import clip_length, padded_ids, prompt_tokens
from segue.models.diffusion.sizes import pixels_per_latent
from segue.models.flux.graph import sizes_of

_LATENTS = 128
"""Height and width of the latents by default."""
_FROM_PICTURE = DiffusionParams(strength=0.6, guidance_scale=7.0)
"""What the pipelines that begin with a picture take by default, with a mask and without."""
_TAKES = frozenset(
    ("prompt_2", "negative_prompt", "negative_prompt_2", "true_cfg_scale", "guidance_scale", "sigmas",
     "max_sequence_length", "strength")
)  # fmt: skip


def rules_of(ctx: LoadContext) -> Rules:
    """Of the pipelines that make a picture from text, or begin with one."""
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
        pictures=(0, 1),
        with_picture=_FROM_PICTURE,
        with_mask=_FROM_PICTURE,
        mask_scale=scale,
    )


class Input(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoders: `{"clip": [ids], "t5": ids}`; `pictures`: [3, H, W] each."""

    def __init__(self, ctx: LoadContext, rules: Rules | None = None) -> None:
        super().__init__(ctx, rules or rules_of(ctx))
        self._clip = load_tokenizer(ctx.model_dir, "tokenizer")
        self._t5 = load_tokenizer(ctx.model_dir, "tokenizer_2")
        self._pictures = VaeImageProcessor(vae_scale_factor=self.rules.multiple)

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        items = [self._item(prompt, params.prompt_2, params)]
        if (negative := negative_of(params)) is not None:
            items.append(self._item(negative, params.negative_prompt_2, params))
        return items

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """T5's, which reads more of it than CLIP."""
        return prompt_tokens(self._t5, params.prompt_2 or prompt, params.max_sequence_length or 512)

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        return pictures_at(self._pictures, params, pictures)

    def _item(self, first: str, second: str | None, params: DiffusionParams) -> dict[str, Any]:
        """An empty second prompt is as the first."""
        return {
            "clip": [padded_ids(self._clip, first, clip_length(self._clip))],
            "t5": padded_ids(self._t5, second or first, params.max_sequence_length or 512),
        }
