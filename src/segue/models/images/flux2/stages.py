"""The torch half of the family. `segue.models.shared.diffusion.transfers` documents the payload of each edge; a text's
item is `{"ids", "mask"}` (`prompts`), its tensors are `{"embeds": [tokens, features]}`; an image's are `latents`
(`vae`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.images.flux2.denoiser import Flux2Denoiser
from segue.models.images.flux2.input import Input
from segue.models.images.flux2.text_encoder import Encoder
from segue.models.images.flux2.vae import Flux2Decoder, Flux2Encoder
from segue.models.shared.diffusion.transfers import images, settings, texts
from segue.models.shared.transfers import whole

STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": Encoder,
    "vae_encoder": Flux2Encoder,
    "denoiser": Flux2Denoiser,
    "decoder": Flux2Decoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "text_encoder"): texts,
    ("input", "vae_encoder"): images,
    ("input", "denoiser"): settings,
    ("text_encoder", "denoiser"): whole,
    ("vae_encoder", "denoiser"): whole,
    ("denoiser", "decoder"): whole,
}
