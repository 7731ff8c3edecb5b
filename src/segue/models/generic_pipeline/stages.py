"""The torch half of the family. The input stage gives `{"arguments": {name: value}, "pictures": {name: tensor or
[tensor, …]}, "outputs": int, "scheduler": str | None, "steps": int, "fps": float}`; pictures are [h, w, 3] uint8.
Between stages of modular blocks goes what `segue.models.generic_pipeline.state.pack` makes of the pipeline's
state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import picked
from segue.models.generic_pipeline.graph import STAGE
from segue.models.generic_pipeline.input import Input
from segue.models.generic_pipeline.pipeline import WholePipeline
from segue.models.generic_pipeline.split import BlockDecoder, BlockDenoiser, BlockEncoder
from segue.models.generic_pipeline.splits import DECODER_STAGE, DENOISER_STAGE, PICTURE_STAGE, TEXT_STAGE
from segue.models.transfers import whole

ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": Input,
    STAGE: WholePipeline,
    TEXT_STAGE: BlockEncoder,
    PICTURE_STAGE: BlockEncoder,
    DENOISER_STAGE: BlockDenoiser,
    DECODER_STAGE: BlockDecoder,
}
_settings = picked("arguments", "outputs", "scheduler", "steps", "fps")
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", STAGE): whole,
    ("input", TEXT_STAGE): _settings,
    ("input", PICTURE_STAGE): whole,
    ("input", DENOISER_STAGE): _settings,
    ("input", DECODER_STAGE): _settings,
    (TEXT_STAGE, DENOISER_STAGE): whole,
    (PICTURE_STAGE, DENOISER_STAGE): whole,
    (DENOISER_STAGE, DECODER_STAGE): whole,
}
