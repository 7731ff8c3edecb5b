"""The input stage: renders a prompt as a turn of the language model that encodes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError
from segue.models.images.z_image.graph import places_of, sizes
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules, images_at
from segue.models.shared.diffusion.library import VaeImageProcessor
from segue.models.shared.diffusion.loading import load_tokenizer, pipeline_index
from segue.models.shared.diffusion.sizes import pixels_per_latent

PIXELS = 1024
"""Default height and width."""
_PADDED = 32
"""The network pads a prompt to a multiple of this many tokens, all of which need positions."""


class Input(DiffusionInput):
    """`ModuleModel`. An item for the text encoder: a list of token ids."""

    def __init__(self, ctx: LoadContext) -> None:
        scale = pixels_per_latent(ctx.model_dir)
        places, *_ = places_of(ctx.model_dir)
        # one position before the prompt stays free, and the image needs one after it
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
                images=(0, 1),
                with_image=DiffusionParams(strength=0.6),
                with_mask=DiffusionParams(strength=1.0),
                mask_scale=scale,
            ),
        )
        self._images = VaeImageProcessor(vae_scale_factor=2 * scale)
        self._tokenizer = load_tokenizer(ctx.model_dir)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{ctx.model_dir / 'tokenizer'}: has no chat template", field="model")

    def completed(self, params: DiffusionParams, images: Sequence[InputImage]) -> DiffusionParams:
        """Fill in defaults; an image keeps its own size unless the request sets one."""
        if images:
            height, width = self._images.get_default_height_width(images[0].image)
            least = self.rules.multiple
            opened = {"height": params.height or max(least, height), "width": params.width or max(least, width)}
            params = msgspec.structs.replace(params, **opened)
        return super().completed(params, images)

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return len(item)

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        return images_at(self._images, params, images)

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        prompts = [prompt]
        if (params.guidance_scale or 0) > 0:
            prompts.append(params.negative_prompt or "")
        return [self._ids(text, params) for text in prompts]

    def _ids(self, prompt: str, params: DiffusionParams) -> list[int]:
        turn = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return list(self._tokenizer(turn, max_length=params.max_sequence_length, truncation=True).input_ids)
