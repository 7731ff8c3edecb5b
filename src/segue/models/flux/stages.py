"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; the item of a text
is `{"clip", "t5"}` (`input`), what it becomes is in `segue.models.diffusion.clip` and `.t5`; of a picture come `mean`
and `std` (`segue.models.diffusion.kl`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import LoadContext, Transfer
from segue.models.diffusion.clip import PooledClipEncoder
from segue.models.diffusion.kl import KLDecoder, KLEncoder
from segue.models.diffusion.loading import pipeline_index
from segue.models.diffusion.t5 import T5Encoder
from segue.models.diffusion.transfers import pictures, texts_for, transfers
from segue.models.flux.denoiser import FluxDenoiser, KontextDenoiser
from segue.models.flux.graph import KONTEXT
from segue.models.flux.input import Input
from segue.models.flux.kontext_input import KontextInput


class T5(T5Encoder):
    """The second text encoder."""

    component = "text_encoder_2"


def input_stage(ctx: LoadContext) -> Input:
    """That of the checkpoint's pipeline."""
    return KontextInput(ctx) if _edits(ctx) else Input(ctx)


def denoiser(ctx: LoadContext) -> FluxDenoiser:
    """Of the kind that the checkpoint's pipeline is."""
    return KontextDenoiser(ctx) if _edits(ctx) else FluxDenoiser(ctx)


def _edits(ctx: LoadContext) -> bool:
    return pipeline_index(ctx.model_dir).get("_class_name") == KONTEXT


ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": input_stage,
    "clip_encoder": PooledClipEncoder,
    "t5_encoder": T5,
    "vae_encoder": KLEncoder,
    "denoiser": denoiser,
    "decoder": KLDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = transfers(
    {"clip_encoder": texts_for("clip"), "t5_encoder": texts_for("t5"), "vae_encoder": pictures}
)
