"""The torch half of the family. `segue.models.shared.diffusion.transfers` documents the payload of each edge; a text's
item is `{"clip", "t5"}` (`input`), its tensors are in `segue.models.shared.diffusion.text_encoder`; an image's are
`mean` and `std` (`segue.models.shared.diffusion.vae`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.images.stable_diffusion_3.denoiser import StableDiffusion3Denoiser
from segue.models.images.stable_diffusion_3.input import Input
from segue.models.shared.diffusion.text_encoder import ClipEncoder, T5Encoder
from segue.models.shared.diffusion.transfers import images, texts_for, transfers
from segue.models.shared.diffusion.vae import KLDecoder, KLEncoder


class Clips(ClipEncoder):
    """The two CLIPs."""

    components = ("text_encoder", "text_encoder_2")


class T5(T5Encoder):
    """The third text encoder."""

    component = "text_encoder_3"


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "clip_encoder": Clips,
    "t5_encoder": T5,
    "vae_encoder": KLEncoder,
    "denoiser": StableDiffusion3Denoiser,
    "decoder": KLDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"clip_encoder": texts_for("clip"), "t5_encoder": texts_for("t5"), "vae_encoder": images}
)
