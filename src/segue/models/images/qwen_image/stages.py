"""The torch half of the family. `segue.models.shared.diffusion.transfers` documents the payload of each edge; a text's
item is `{"ids", "drop", "most"}` (`input`), with images also `pixels` and `grid` (`edit_input`), its tensors are
`{"embeds": [tokens, hidden]}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.images.qwen_image.decoder import QwenImageDecoder
from segue.models.images.qwen_image.denoiser import QwenImageDenoiser
from segue.models.images.qwen_image.edit_input import input_stage
from segue.models.images.qwen_image.text_encoder import Encoder
from segue.models.images.qwen_image.vae_encoder import QwenImageVaeEncoder
from segue.models.shared.diffusion.transfers import images, texts, transfers

STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": input_stage,
    "text_encoder": Encoder,
    "vae_encoder": QwenImageVaeEncoder,
    "denoiser": QwenImageDenoiser,
    "decoder": QwenImageDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers({"text_encoder": texts, "vae_encoder": images})
