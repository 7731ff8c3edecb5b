"""The input stage: prompts in the template that the text encoder was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.diffusion.input import DiffusionInput, Picture, Rules, negative_of, pictures_at
from segue.models.diffusion.library import VaeImageProcessor
from segue.models.diffusion.loading import component_config, load_tokenizer, pipeline_index
from segue.models.qwen_image.graph import LONGEST, pixels_per_latent, sizes

TEMPLATE = (
    "<|im_start|>system\n"
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""What the published text encoder was trained with, as the library's pipeline has it."""
DROP = 34
"""Tokens of the template before the prompt, whose hidden states are left out."""
_LATENTS = 128
"""Height and width of the latents by default."""
_FROM_PICTURE = DiffusionParams(strength=0.6)
"""What the pipelines that begin with a picture take by default, with a mask and without."""


def check_undistilled(model_dir: Path) -> None:
    """Raise `ConfigError` for a network with guidance distilled into it."""
    if component_config(model_dir, "transformer").get("guidance_embeds"):
        raise ConfigError("guidance-distilled Qwen-Image is not in the library", field="guidance_embeds")


class Input(DiffusionInput):
    """`ModuleAdapter`. An item for the text encoder: `{"ids": [int, …], "drop": int, "most": int}`."""

    def __init__(self, ctx: LoadContext) -> None:
        check_undistilled(ctx.model_dir)
        scale = pixels_per_latent(ctx.model_dir)
        size = _LATENTS * scale
        super().__init__(
            ctx,
            Rules(
                defaults=DiffusionParams(
                    height=size, width=size, num_inference_steps=50, true_cfg_scale=4.0, max_sequence_length=512
                ),
                takes=frozenset({"negative_prompt", "true_cfg_scale", "sigmas", "max_sequence_length", "strength"}),
                sizes=sizes(pipeline_index(ctx.model_dir), ctx.model_dir),
                max_sequence_length=LONGEST,
                pictures=(0, 1),
                with_picture=_FROM_PICTURE,
                with_mask=_FROM_PICTURE,
                mask_scale=scale,
            ),
        )
        self._pictures = VaeImageProcessor(vae_scale_factor=2 * scale)
        self._tokenizer = load_tokenizer(ctx.model_dir)

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        prompts = [prompt]
        if (negative := negative_of(params)) is not None:
            prompts.append(negative)
        return [self._item(text, params) for text in prompts]

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return min(len(item["ids"]) - item["drop"], item["most"])

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        return pictures_at(self._pictures, params, pictures)

    def _item(self, prompt: str, params: DiffusionParams) -> dict[str, Any]:
        ids = self._tokenizer(TEMPLATE.format(prompt), max_length=LONGEST + DROP, truncation=True).input_ids
        if len(ids) <= DROP:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        return {"ids": ids, "drop": DROP, "most": params.max_sequence_length}
