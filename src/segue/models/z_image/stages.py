"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; the item of a text
is a list of token ids (`input`), what it becomes `{"embeds": [tokens, hidden]}`; of a picture come `mean` and `std`
(`segue.models.diffusion.kl`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.kl import KLDecoder, KLEncoder
from segue.models.diffusion.transfers import pictures, texts, transfers
from segue.models.z_image.denoiser import ZImageDenoiser
from segue.models.z_image.input import Input
from segue.models.z_image.text_encoder import Encoder

ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": Encoder,
    "vae_encoder": KLEncoder,
    "denoiser": ZImageDenoiser,
    "decoder": KLDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers({"text_encoder": texts, "vae_encoder": pictures})
