"""The torch half of the family. In addition to the payload in `segue.models.shared.diffusion.transfers`, the input
stage returns `texts_2` for the second text encoder and, for an input image, `images`: [[3, height, width]] in [-1,
1]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.images.sdxl.decoder import SdxlDecoder
from segue.models.images.sdxl.denoiser import SdxlDenoiser
from segue.models.images.sdxl.input import Input
from segue.models.images.sdxl.text_encoder import ClipEncoder
from segue.models.images.sdxl.vae_encoder import SdxlVaeEncoder
from segue.models.shared.diffusion.transfers import images, renamed, texts, transfers

STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": ClipEncoder,
    "text_encoder_2": ClipEncoder,
    "vae_encoder": SdxlVaeEncoder,
    "denoiser": SdxlDenoiser,
    "decoder": SdxlDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"text_encoder": texts, "text_encoder_2": renamed("texts_2", "texts"), "vae_encoder": images}
)
