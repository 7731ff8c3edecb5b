"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; the item of a text
is `{"ids", "drop", "most"}` (`input`), of one with pictures also `pixels` and `grid` (`edit_input`), what it becomes
`{"embeds": [tokens, hidden]}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import pictures, texts, transfers
from segue.models.qwen_image.decoder import QwenImageDecoder
from segue.models.qwen_image.denoiser import QwenImageDenoiser
from segue.models.qwen_image.edit_input import input_stage
from segue.models.qwen_image.text_encoder import Encoder
from segue.models.qwen_image.vae_encoder import QwenImageVaeEncoder

ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": input_stage,
    "text_encoder": Encoder,
    "vae_encoder": QwenImageVaeEncoder,
    "denoiser": QwenImageDenoiser,
    "decoder": QwenImageDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers({"text_encoder": texts, "vae_encoder": pictures})
