"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; items of texts and
pictures are in `input`, what they become in `text_encoder` and `picture_encoders`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import picked, texts, transfers
from segue.models.wan.decoder import WanDecoder
from segue.models.wan.denoiser import WanDenoiser
from segue.models.wan.input import Input
from segue.models.wan.picture_encoders import ImageEncoder, VaeEncoder
from segue.models.wan.text_encoder import Encoder

ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": Encoder,
    "vae_encoder": VaeEncoder,
    "image_encoder": ImageEncoder,
    "denoiser": WanDenoiser,
    "decoder": WanDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"text_encoder": texts, "vae_encoder": picked("pictures"), "image_encoder": picked("looks")}
)
