"""The torch half of the family. `segue.models.shared.diffusion.transfers` documents the payload of each edge; `input`
the items of texts and images; `text_encoder` and `image_encoders` their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.images.wan.decoder import WanDecoder
from segue.models.images.wan.denoiser import WanDenoiser
from segue.models.images.wan.image_encoders import ImageEncoder, VaeEncoder
from segue.models.images.wan.input import Input
from segue.models.images.wan.text_encoder import Encoder
from segue.models.shared.diffusion.transfers import picked, texts, transfers

STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": Encoder,
    "vae_encoder": VaeEncoder,
    "image_encoder": ImageEncoder,
    "denoiser": WanDenoiser,
    "decoder": WanDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"text_encoder": texts, "vae_encoder": picked("images"), "image_encoder": picked("looks")}
)
