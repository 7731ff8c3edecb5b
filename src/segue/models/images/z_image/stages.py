"""The torch half of the family. `segue.models.shared.diffusion.transfers` documents the payload of each edge; a text's
item is a list of token ids (`input`), its tensors are `{"embeds": [tokens, hidden]}`; an image's are `mean` and `std`
(`segue.models.shared.diffusion.vae`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.images.z_image.denoiser import ZImageDenoiser
from segue.models.images.z_image.input import Input
from segue.models.images.z_image.text_encoder import Encoder
from segue.models.shared.diffusion.transfers import images, texts, transfers
from segue.models.shared.diffusion.vae import KLDecoder, KLEncoder

STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": Encoder,
    "vae_encoder": KLEncoder,
    "denoiser": ZImageDenoiser,
    "decoder": KLDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers({"text_encoder": texts, "vae_encoder": images})
