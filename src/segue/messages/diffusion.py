"""Parameters of a request for images or video, under the argument names of diffusers' pipelines.

This module checks types and general bounds; the family's input stage checks values that depend on the checkpoint
(which sizes it can make, how many steps are absurd).

Optional reading: the parameters of an image or a video.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, wrong
from segue.messages.sampling import misfit

SIZE = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})")
"""Width and height in pixels, as text."""


class DiffusionParams(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of one generation; None stands for the default of the family's pipeline."""

    negative_prompt: str | None = None
    prompt_2: str | None = None
    prompt_3: str | None = None
    negative_prompt_2: str | None = None
    negative_prompt_3: str | None = None
    height: int | None = None
    """Pixels."""
    width: int | None = None
    max_area: int | None = None
    """Pixels: height and width are scaled to fit it, keeping their ratio; for models that edit an image."""
    num_frames: int | None = None
    seconds: float | None = None
    """Length of a video, instead of `num_frames`: rounded to the nearest number of frames that the model makes."""
    fps: float | None = None
    """Frame rate of the written file; the network knows no frame rate."""
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    """Guidance of the second network, if one network runs the first steps and another the last."""
    true_cfg_scale: float | None = None
    guidance_rescale: float | None = None
    """How far the guided prediction is rescaled to the standard deviation of the prompt's own prediction, 0 to 1."""
    eta: float | None = None
    """For DDIM: how much noise each step adds, 0 to 1."""
    clip_skip: int | None = None
    """Number of a text encoder's last layers to skip."""
    original_size: tuple[int, int] | None = None
    """(height, width) given to the network, if it is conditioned on sizes; likewise the sizes below."""
    crops_coords_top_left: tuple[int, int] | None = None
    target_size: tuple[int, int] | None = None
    negative_original_size: tuple[int, int] | None = None
    negative_crops_coords_top_left: tuple[int, int] | None = None
    negative_target_size: tuple[int, int] | None = None
    guidance_interval: tuple[float, float] | None = None
    """(from, to) as fractions of the steps, e.g. (0.1, 0.8): outside it, the guidance branch is not computed. Lossy."""
    sigmas: list[float] | None = None
    """Noise levels instead of `num_inference_steps`, if the scheduler takes them; strictly falling."""
    scheduler: str | None = None
    """Class name of one of diffusers' schedulers, instead of the checkpoint's."""
    strength: float | None = None
    """How much of the given image is regenerated, 0 to 1; for models that start from an image."""
    num_images_per_prompt: int = 1
    """Images (or videos) per request: noise of image i is slice i of the noise drawn from the seed, as in diffusers."""
    max_sequence_length: int | None = None
    """Tokens of the prompt that the text encoder sees."""
    step_cache: str | None = None
    """One of `STEP_CACHES`: faster, but lossy. None: exact."""
    step_cache_threshold: float | None = None
    """With `first_block`: the other blocks are skipped while the first block's residual changes by at most this ratio
    (None: 0.05). With `teacache`: all blocks are skipped up to this sum of rescaled changes (None: the model's own)."""
    progress: bool = False
    """Send a `ProgressDelta` after every step."""
    partial_images: int = 0
    """Number of previews, evenly spread over the steps."""


FIRST_BLOCK, TAYLORSEER, TEACACHE = "first_block", "taylorseer", "teacache"
STEP_CACHES = (FIRST_BLOCK, TAYLORSEER, TEACACHE)
BLOCK_CACHES = (FIRST_BLOCK, TEACACHE)
"""The step caches that skip blocks of a call."""
_ALSO = {"num_videos_per_prompt": "num_images_per_prompt"}
"""Alternative names that video pipelines use, and ours."""
PARAMETERS = frozenset(DiffusionParams.__struct_fields__) | frozenset(_ALSO)
"""Names of all parameters that a request may set."""
_AT_LEAST_ONE = (
    "height",
    "width",
    "max_area",
    "num_frames",
    "num_inference_steps",
    "num_images_per_prompt",
    "max_sequence_length",
)
_SIZES = (
    *("original_size", "crops_coords_top_left", "target_size"),
    *("negative_original_size", "negative_crops_coords_top_left", "negative_target_size"),
)
_MOST = 10_000
"""Largest guidance or noise level: far above any useful value, and far below those that turn an image into NaN."""
_SLOWEST, _FASTEST = 0.01, 1000
"""Bounds on the frames per second of a written file."""
_NUMBERS = ("guidance_scale", "guidance_scale_2", "true_cfg_scale")


def diffusion_from(values: Mapping[str, Any]) -> DiffusionParams:
    """Checked parameters from what a caller writes; None stands for the default. Raises `InvalidRequest`."""
    given = {name: value for name, value in values.items() if value is not None}
    for also, name in _ALSO.items():
        if also in given:
            value = given.pop(also)
            if given.setdefault(name, value) != value:
                raise wrong(also, value, f"left out if {name} is given, which means the same")
    try:
        params = msgspec.convert(given, DiffusionParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise misfit(error) from error
    check_diffusion(params)
    return params


def check_diffusion(params: DiffusionParams) -> None:
    """Raise `InvalidRequest`, naming field, value and remedy, for values that no model accepts."""
    for name in _AT_LEAST_ONE:
        value = getattr(params, name)
        if value is not None and value < 1:
            raise wrong(name, value, "at least 1")
    for name in _NUMBERS:
        value = getattr(params, name)
        if value is not None and not 0 <= value <= _MOST:
            raise wrong(name, value, f"from 0 to {_MOST}")
    if params.fps is not None and not _SLOWEST <= params.fps <= _FASTEST:
        raise wrong("fps", params.fps, f"from {_SLOWEST} to {_FASTEST}")
    for name in ("seconds", "step_cache_threshold"):
        value = getattr(params, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise wrong(name, value, "a finite number above 0")
    if params.seconds is not None and params.num_frames is not None:
        raise wrong("seconds", params.seconds, "left out if num_frames is given")
    _check_step_cache(params)
    if params.strength is not None and not 0 < params.strength <= 1:
        raise wrong("strength", params.strength, "above 0 and at most 1")
    for name in ("guidance_rescale", "eta"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= 1:
            raise wrong(name, value, "from 0 to 1")
    if params.clip_skip is not None and params.clip_skip < 0:
        raise wrong("clip_skip", params.clip_skip, "at least 0")
    for name in _SIZES:
        size = getattr(params, name)
        if size is not None and not all(0 <= side < 2**16 for side in size):
            raise wrong(name, size, "two numbers of pixels")
    if params.partial_images < 0:
        raise wrong("partial_images", params.partial_images, "at least 0")
    if params.guidance_interval is not None:
        begin, end = params.guidance_interval
        if not 0 <= begin <= end <= 1:
            raise wrong("guidance_interval", params.guidance_interval, "(from, to) with 0 <= from <= to <= 1")
    if params.sigmas is not None:
        levels = list(map(_in_32_bits, params.sigmas))
        falling = all(higher > lower >= 0 for higher, lower in pairwise(levels))
        if not (levels and 0 < levels[0] <= _MOST and falling):
            right = f"a list of noise levels that starts above 0 and falls (in float32), each from 0 to {_MOST}"
            raise wrong("sigmas", params.sigmas, right)
        if params.num_inference_steps not in (None, len(params.sigmas)):
            right = f"left out if sigmas are given, or their number, {len(params.sigmas)}"
            raise wrong("num_inference_steps", params.num_inference_steps, right)


def _check_step_cache(params: DiffusionParams) -> None:
    name = params.step_cache
    if name is not None and name not in STEP_CACHES:
        raise wrong("step_cache", name, f"one of {', '.join(STEP_CACHES)}")
    if params.step_cache_threshold is not None and name not in BLOCK_CACHES:
        raise InvalidRequest(
            f"step_cache_threshold is {params.step_cache_threshold}, but step_cache is {name!r}; it works with "
            f"{' and '.join(BLOCK_CACHES)}",
            field="step_cache_threshold",
        )


def _in_32_bits(level: float) -> float:
    """Round to float32, as schedulers do. A level above `_MOST` stays unrounded."""
    if not abs(level) <= _MOST:
        return level
    [rounded] = struct.unpack("f", struct.pack("f", level))
    return float(rounded)
