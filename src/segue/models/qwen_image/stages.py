"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; the item of a text
is `{"ids", "drop", "most"}` (`input`), of one with pictures also `pixels` and `grid` (`edit_input`), what it becomes
`{"embeds": [tokens, hidden]}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import pictures, settings, texts, whole
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
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "text_encoder"): texts,
    ("input", "vae_encoder"): pictures,
    ("input", "denoiser"): settings,
    ("text_encoder", "denoiser"): whole,
    ("vae_encoder", "denoiser"): whole,
    ("denoiser", "decoder"): whole,
}
