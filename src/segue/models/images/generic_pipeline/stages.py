"""The torch half of the family. The input stage returns `{"arguments": {name: value}, "images": {name: tensor or
[tensor, …]}, "outputs": int, "scheduler": str | None, "steps": int, "fps": float}`; images are [h, w, 3] uint8. Stages
of modular blocks pass on the pipeline's state, packed by `segue.models.images.generic_pipeline.state.pack`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.images.generic_pipeline.graph import STAGE
from segue.models.images.generic_pipeline.input import Input
from segue.models.images.generic_pipeline.pipeline import WholePipeline
from segue.models.images.generic_pipeline.split import BlockDecoder, BlockDenoiser, BlockEncoder
from segue.models.images.generic_pipeline.splits import DECODER_STAGE, DENOISER_STAGE, IMAGE_STAGE, TEXT_STAGE
from segue.models.shared.diffusion.transfers import picked
from segue.models.shared.transfers import whole

STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": Input,
    STAGE: WholePipeline,
    TEXT_STAGE: BlockEncoder,
    IMAGE_STAGE: BlockEncoder,
    DENOISER_STAGE: BlockDenoiser,
    DECODER_STAGE: BlockDecoder,
}
_settings = picked("arguments", "outputs", "scheduler", "steps", "fps")
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", STAGE): whole,
    ("input", TEXT_STAGE): _settings,
    ("input", IMAGE_STAGE): whole,
    ("input", DENOISER_STAGE): _settings,
    ("input", DECODER_STAGE): _settings,
    (TEXT_STAGE, DENOISER_STAGE): whole,
    (IMAGE_STAGE, DENOISER_STAGE): whole,
    (DENOISER_STAGE, DECODER_STAGE): whole,
}
