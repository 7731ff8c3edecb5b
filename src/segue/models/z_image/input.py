"""The input stage: prompts as a turn of the language model that encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError
from segue.models.diffusion.input import DiffusionInput, Picture, Rules, pictures_at
from segue.models.diffusion.library import VaeImageProcessor
from segue.models.diffusion.loading import load_tokenizer, pipeline_index
from segue.models.diffusion.sizes import pixels_per_latent
from segue.models.z_image.graph import places_of, sizes

PIXELS = 1024
"""Height and width by default."""
_PADDED = 32
"""The network fills a prompt up to a multiple of so many tokens, which all have positions."""


class Input(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoder: a list of token ids."""

    def __init__(self, ctx: LoadContext) -> None:
        scale = pixels_per_latent(ctx.model_dir)
        places, *_ = places_of(ctx.model_dir)
        # a place before them is kept free, and one behind for the picture
        longest = (places - 2) // _PADDED * _PADDED
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(
                    height=PIXELS,
                    width=PIXELS,
                    num_inference_steps=50,
                    guidance_scale=5.0,
                    max_sequence_length=min(512, longest),
                ),
                takes=frozenset({"negative_prompt", "guidance_scale", "sigmas", "max_sequence_length", "strength"}),
                sizes=sizes(pipeline_index(ctx.model_dir), ctx.model_dir),
                max_sequence_length=longest,
                pictures=(0, 1),
                with_picture=DiffusionParams(strength=0.6),
                with_mask=DiffusionParams(strength=1.0),
                mask_scale=scale,
            ),
        )
        self._pictures = VaeImageProcessor(vae_scale_factor=2 * scale)
        self._tokenizer = load_tokenizer(ctx.model_dir)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{ctx.model_dir / 'tokenizer'}: has no chat template", field="model")

    def completed(self, params: DiffusionParams, pictures: Sequence[Picture]) -> DiffusionParams:
        """A picture is made in its own size, where nothing else is said."""
        if pictures:
            height, width = self._pictures.get_default_height_width(pictures[0].image)
            least = self.rules.multiple
            opened = {"height": params.height or max(least, height), "width": params.width or max(least, width)}
            params = msgspec.structs.replace(params, **opened)
        return super().completed(params, pictures)

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return len(item)

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        return pictures_at(self._pictures, params, pictures)

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        prompts = [prompt]
        if (params.guidance_scale or 0) > 0:
            prompts.append(params.negative_prompt or "")
        return [self._ids(text, params) for text in prompts]

    def _ids(self, prompt: str, params: DiffusionParams) -> list[int]:
        turn = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return list(self._tokenizer(turn, max_length=params.max_sequence_length, truncation=True).input_ids)
