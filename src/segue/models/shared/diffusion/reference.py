"""Run diffusers' own pipeline of a checkpoint, as the reference for Segue's results."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from segue.messages.diffusion import DiffusionParams
from segue.messages.reference import LibraryAnswer, Pixels, Question
from segue.messages.request import Request
from segue.models.shared.diffusion.library import diffusers
from segue.models.shared.reference import Library, Reference, check_arguments, image_of, media_of


class Pipeline:
    """`Reference`. Noise is drawn on the CPU from the request's seed, as Segue does."""

    def __init__(self, library: Library) -> None:
        spread = {"device_map": "balanced"} if library.device == "auto" else {}
        pipeline = diffusers.DiffusionPipeline.from_pretrained(library.model_dir, dtype=library.dtype, **spread)
        self._pipeline: Any = pipeline if spread else pipeline.to(library.device)
        self._pipeline.set_progress_bar_config(disable=True)

    def answer(self, question: Question) -> LibraryAnswer:
        given = arguments_of(question.request)
        check_arguments(self._pipeline.__call__, given)
        generator = torch.Generator().manual_seed(question.request.seed or 0)
        with torch.inference_mode():
            made = self._pipeline(**given, generator=generator, output_type="np")
        return LibraryAnswer(index=question.index, pixels=[_pixels(one) for one in made[0]])


def arguments_of(request: Request) -> dict[str, Any]:
    """The request's parameters as the pipeline's arguments."""
    asked = request.diffusion or DiffusionParams()
    defaults = DiffusionParams()
    given: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(asked).items() if value != getattr(defaults, name)
    }
    given |= {part.role or part.kind: image_of(part) for part in media_of(request)}
    return {"prompt": request.prompt, **given}


def _pixels(made: Any) -> Pixels:
    """Convert outputs to [h, w, 3] or [frames, h, w, 3] in [0, 1]."""
    levels = (np.asarray(made, dtype=np.float32) * 255).round().clip(0, 255).astype(np.uint8)
    return Pixels(levels.shape, levels.tobytes())


def load(library: Library) -> Reference:
    return Pipeline(library)
