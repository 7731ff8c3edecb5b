"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; the item of a text
is `{"ids", "mask"}` (`prompts`), what it becomes `{"embeds": [tokens, features]}`; of a picture come `latents`
(`vae`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import pictures, settings, texts
from segue.models.flux2.denoiser import Flux2Denoiser
from segue.models.flux2.input import Input
from segue.models.flux2.text_encoder import Encoder
from segue.models.flux2.vae import Flux2Decoder, Flux2Encoder
from segue.models.transfers import whole

ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": Encoder,
    "vae_encoder": Flux2Encoder,
    "denoiser": Flux2Denoiser,
    "decoder": Flux2Decoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "text_encoder"): texts,
    ("input", "vae_encoder"): pictures,
    ("input", "denoiser"): settings,
    ("text_encoder", "denoiser"): whole,
    ("vae_encoder", "denoiser"): whole,
    ("denoiser", "decoder"): whole,
}
