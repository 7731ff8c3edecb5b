"""The input stage: takes a pipeline's arguments by their own names, and refuses unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from segue.engines.contract import LoadContext, Payload
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge, nearest, wrong
from segue.messages.request import MediaPart, Request
from segue.models.images.generic_pipeline.checks import OwnChecks
from segue.models.images.generic_pipeline.signature import signature_of
from segue.models.images.generic_pipeline.splits import split_of
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers
from segue.models.shared.diffusion.input import OutputLimits, images_of, prompt_of
from segue.models.shared.diffusion.loading import pipeline_index
from segue.models.shared.diffusion.masks import MASK, MASK_IMAGE, mask_image
from segue.models.shared.input_stage import InputStage

DEFAULT_STEPS = 50
"""Used if neither the request nor the pipeline sets the number."""
DEFAULT_FPS = 16.0
_SERVED = frozenset({"num_images_per_prompt", "scheduler", "progress", "fps", "num_inference_steps"})
"""Parameters that are not arguments of a pipeline, or have another name there."""

_KINDS: tuple[tuple[type, tuple[type, ...], str], ...] = (
    (bool, (bool,), "true or false"),
    (int, (int, float), "a number"),
    (float, (int, float), "a number"),
    (str, (str,), "a string"),
)
"""By the type of a default: the types of valid values."""


class Input(InputStage):
    """`ModuleModel`: a request → the payload that `segue.models.images.generic_pipeline.stages` documents."""

    def __init__(self, ctx: LoadContext) -> None:
        self._signature = signature_of(ctx.model_dir)
        self._limits = OutputLimits.of(ctx)
        self._media = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._media.budget
        has_one = "scheduler" in pipeline_index(ctx.model_dir)
        self._schedulers = Schedulers(ctx.model_dir) if has_one else None
        split = split_of(pipeline_index(ctx.model_dir))
        self._own_checks = None if split is None else OwnChecks(ctx.model_dir, self._signature)
        self._one_output = self._signature.count is None or (split is not None and split.one_output)

    def process(self, request: Request) -> Payload:
        params = request.diffusion or DiffusionParams()
        neutral = msgspec.to_builtins(DiffusionParams())
        given = {name: value for name, value in msgspec.to_builtins(params).items() if value != neutral[name]}
        arguments = {name: value for name, value in {**given, **request.options}.items() if name not in _SERVED}
        self._check_names((*arguments, *(name for name in given if name == "num_inference_steps")))
        steps = self._steps(params)
        self._check_types(arguments)
        self._check_limits(params, arguments, steps)
        self._check_scheduler(params.scheduler)
        if "num_inference_steps" in self._signature.defaults:
            arguments["num_inference_steps"] = steps
        arguments = {"prompt": prompt_of(request), **arguments}
        if self._own_checks is not None:  # blocks have other defaults than the pipeline, and fewer checks
            arguments = {**self._signature.plain, **arguments}
            self._own_checks.check(arguments)
        return {
            "arguments": arguments,
            "images": self._images(images_of(request)),
            "outputs": params.num_images_per_prompt,
            "scheduler": params.scheduler,
            "steps": steps,
            "fps": params.fps or DEFAULT_FPS,
        }

    def _check_names(self, names: Iterable[str]) -> None:
        known = self._signature.free | {"num_inference_steps"} & set(self._signature.defaults)
        for name in names:
            if name not in known:
                kind = self._signature.kind.__name__
                raise InvalidRequest(f"{kind} takes no {name!r}{nearest(name, known)}", field=name)

    def _steps(self, params: DiffusionParams) -> int:
        default = self._signature.defaults.get("num_inference_steps")
        return params.num_inference_steps or (default if isinstance(default, int) else DEFAULT_STEPS)

    def _check_types(self, arguments: dict[str, Any]) -> None:
        """Check arguments whose default shows their type."""
        for name, value in arguments.items():
            default = self._signature.defaults[name]
            for kind, fits, says in _KINDS:
                if isinstance(default, kind):
                    if value is not None and (not isinstance(value, fits) or isinstance(value, bool) != (kind is bool)):
                        raise wrong(name, value, says)
                    break

    def _check_limits(self, params: DiffusionParams, arguments: dict[str, Any], steps: int) -> None:
        limits = self._limits
        size = [arguments.get(name, self._signature.defaults.get(name)) for name in ("height", "width")]
        pixels = [side if isinstance(side, int) else 0 for side in size]
        frames = arguments.get("num_frames")
        for name, value, most, limit in (
            ("height", pixels[0] * pixels[1], limits.max_output_pixels, "max_output_pixels"),
            ("num_inference_steps", steps, limits.max_inference_steps, "max_inference_steps"),
            ("num_images_per_prompt", params.num_images_per_prompt, limits.max_outputs, "max_outputs"),
            ("num_frames", frames if isinstance(frames, int) else 0, limits.max_output_frames, "max_output_frames"),
        ):
            if value > most:
                what = "height x width" if name == "height" else name
                raise TooLarge(f"{what} is {value}; at most {most} ({limit})", field=name)
        if params.num_images_per_prompt > 1 and self._one_output:
            kind, asked = self._signature.kind.__name__, params.num_images_per_prompt
            raise InvalidRequest(
                f"num_images_per_prompt is {asked}; {kind} makes one output per request", field="num_images_per_prompt"
            )

    def _check_scheduler(self, name: str | None) -> None:
        if name is None:
            return
        if self._schedulers is None:
            raise InvalidRequest("this pipeline does not have exactly one scheduler to replace", field="scheduler")
        self._schedulers.check(name)

    def _images(self, parts: list[MediaPart]) -> Payload:
        made: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            name = MASK_IMAGE if part.role == MASK else part.role or "image"
            if name not in self._signature.defaults:
                raise InvalidRequest(f"{self._signature.kind.__name__} takes no {name}", field=part.field or name)
            if part.role == MASK:
                [height, width, _] = made["image"][0].shape if "image" in made else (0, 0, 0)
                mask = mask_image(part, (width, height) if width else None, self._media)
                pixels = np.array(mask.convert("RGB"))
            else:
                pixels = decode_image(part, self._media)
            made.setdefault(name, []).append(torch.from_numpy(pixels))
        return {name: images[0] if len(images) == 1 else images for name, images in made.items()}
