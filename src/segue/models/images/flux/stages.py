"""The torch half of the family. `segue.models.shared.diffusion.transfers` documents the payload of each edge; a text's
item is `{"clip", "t5"}` (`input`), its tensors are in `segue.models.shared.diffusion.text_encoder`; an image's are
`mean` and `std` (`segue.models.shared.diffusion.vae`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import LoadContext, Transfer
from segue.engines.diffusion.contract import DenoiserContext
from segue.models.images.flux.denoiser import FluxDenoiser, KontextDenoiser
from segue.models.images.flux.graph import KONTEXT
from segue.models.images.flux.input import Input
from segue.models.images.flux.kontext_input import KontextInput
from segue.models.shared.diffusion.loading import pipeline_index
from segue.models.shared.diffusion.text_encoder import PooledClipEncoder, T5Encoder
from segue.models.shared.diffusion.transfers import images, texts_for, transfers
from segue.models.shared.diffusion.vae import KLDecoder, KLEncoder


class T5(T5Encoder):
    """The second text encoder."""

    component = "text_encoder_2"


def input_stage(ctx: LoadContext) -> Input:
    """The input stage of the checkpoint's pipeline."""
    return KontextInput(ctx) if _edits(ctx) else Input(ctx)


def denoiser(ctx: DenoiserContext) -> FluxDenoiser:
    """The denoiser of the checkpoint's pipeline."""
    return KontextDenoiser(ctx) if _edits(ctx) else FluxDenoiser(ctx)


def _edits(ctx: LoadContext) -> bool:
    return pipeline_index(ctx.model_dir).get("_class_name") == KONTEXT


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": input_stage,
    "clip_encoder": PooledClipEncoder,
    "t5_encoder": T5,
    "vae_encoder": KLEncoder,
    "denoiser": denoiser,
    "decoder": KLDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"clip_encoder": texts_for("clip"), "t5_encoder": texts_for("t5"), "vae_encoder": images}
)
