"""The input stage: prompts as a turn of the language model that encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.engines.contract import LoadContext
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError
from segue.models.diffusion.input import DiffusionInput, Picture, Rules
from segue.models.diffusion.kl import pixels_per_latent
from segue.models.diffusion.loading import component_config, load_tokenizer

PIXELS = 1024
"""Height and width by default."""
_PADDED = 32
"""The network fills a prompt up to a multiple of so many tokens, which all have positions."""


class Input(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoder: a list of token ids."""

    def __init__(self, ctx: LoadContext) -> None:
        scale = pixels_per_latent(ctx.model_dir)
        places, rows, columns = component_config(ctx.model_dir, "transformer").get("axes_lens", (1024, 512, 512))
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
                takes=frozenset({"negative_prompt", "guidance_scale", "sigmas", "max_sequence_length"}),
                multiple=2 * scale,
                largest_side=2 * scale * min(rows, columns),
                max_sequence_length=longest,
            ),
        )
        self._tokenizer = load_tokenizer(ctx.model_dir)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{ctx.model_dir / 'tokenizer'}: has no chat template", field="model")

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
