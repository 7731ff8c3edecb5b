"""The torch half of the family. Beside what `segue.models.diffusion.transfers` says, the input stage gives `texts_2`
for the second text encoder and, where there is a picture to begin with, `pictures`: [[3, height, width]] in [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import pictures, renamed, texts, transfers
from segue.models.sdxl.decoder import SdxlDecoder
from segue.models.sdxl.denoiser import SdxlDenoiser
from segue.models.sdxl.input import Input
from segue.models.sdxl.text_encoder import ClipEncoder
from segue.models.sdxl.vae_encoder import SdxlVaeEncoder

ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": ClipEncoder,
    "text_encoder_2": ClipEncoder,
    "vae_encoder": SdxlVaeEncoder,
    "denoiser": SdxlDenoiser,
    "decoder": SdxlDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"text_encoder": texts, "text_encoder_2": renamed("texts_2", "texts"), "vae_encoder": pictures}
)
