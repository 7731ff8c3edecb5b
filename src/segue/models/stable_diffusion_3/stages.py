"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; the item of a text
is `{"clip", "t5"}` (`input`), what it becomes is in `segue.models.diffusion.clip` and `.t5`; of a picture come `mean`
and `std` (`segue.models.diffusion.kl`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.clip import ClipEncoder
from segue.models.diffusion.kl import KLDecoder, KLEncoder
from segue.models.diffusion.t5 import T5Encoder
from segue.models.diffusion.transfers import pictures, texts_for, transfers
from segue.models.stable_diffusion_3.denoiser import StableDiffusion3Denoiser
from segue.models.stable_diffusion_3.input import Input


class Clips(ClipEncoder):
    """The two CLIPs."""

    components = ("text_encoder", "text_encoder_2")


class T5(T5Encoder):
    """The third text encoder."""

    component = "text_encoder_3"


ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "clip_encoder": Clips,
    "t5_encoder": T5,
    "vae_encoder": KLEncoder,
    "denoiser": StableDiffusion3Denoiser,
    "decoder": KLDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"clip_encoder": texts_for("clip"), "t5_encoder": texts_for("t5"), "vae_encoder": pictures}
)
