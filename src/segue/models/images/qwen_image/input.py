"""The input stage: puts prompts into the template that the text encoder was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.qwen_image.graph import LONGEST, pixels_per_latent, sizes
from segue.models.shared.diffusion.input import DiffusionInput, InputImage, Rules, images_at, negative_of
from segue.models.shared.diffusion.library import VaeImageProcessor
from segue.models.shared.diffusion.loading import component_config, load_tokenizer, pipeline_index

TEMPLATE = (
    "<|im_start|>system\n"
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""The template with which the published denoiser was trained, from the library's pipeline."""
DROP = 34
"""Leading template tokens, whose hidden states are dropped."""
_LATENTS = 128
"""Default height and width of the latents."""
_FROM_IMAGE = DiffusionParams(strength=0.6)
"""Defaults of the image-to-image pipelines, with and without a mask."""


def check_undistilled(model_dir: Path) -> None:
    """Raise `ConfigError` for a guidance-distilled network."""
    if component_config(model_dir, "transformer").get("guidance_embeds"):
        raise ConfigError("guidance-distilled Qwen-Image is not supported by the library", field="guidance_embeds")


class Input(DiffusionInput):
    """`ModuleModel`. An item for the text encoder: `{"ids": [int, …], "drop": int, "most": int}`."""

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
                images=(0, 1),
                with_image=_FROM_IMAGE,
                with_mask=_FROM_IMAGE,
                mask_scale=scale,
            ),
        )
        self._images = VaeImageProcessor(vae_scale_factor=2 * scale)
        self._tokenizer = load_tokenizer(ctx.model_dir)

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        prompts = [prompt]
        if (negative := negative_of(params)) is not None:
            prompts.append(negative)
        return [self._item(text, params) for text in prompts]

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        return min(len(item["ids"]) - item["drop"], item["most"])

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        return images_at(self._images, params, images)

    def _item(self, prompt: str, params: DiffusionParams) -> dict[str, Any]:
        ids = self._tokenizer(TEMPLATE.format(prompt), max_length=LONGEST + DROP, truncation=True).input_ids
        if len(ids) <= DROP:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        return {"ids": ids, "drop": DROP, "most": params.max_sequence_length}
