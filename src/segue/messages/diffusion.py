"""What a request asks of a model that makes pictures or video: the pipelines' own argument names.

Types are checked at the door; values that only the checkpoint can judge (which sizes it can make, how many steps are
absurd) are checked by the family's input stage.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, wrong
from segue.messages.sampling import misfit


class DiffusionParams(msgspec.Struct, kw_only=True, frozen=True):
    """None: what the family's pipeline takes by default."""

    negative_prompt: str | None = None
    prompt_2: str | None = None
    prompt_3: str | None = None
    negative_prompt_2: str | None = None
    negative_prompt_3: str | None = None
    height: int | None = None
    """Pixels."""
    width: int | None = None
    max_area: int | None = None
    """Pixels: height and width are made to fit it, in their proportions; of models that edit a picture."""
    num_frames: int | None = None
    seconds: float | None = None
    """Of a video, instead of `num_frames`: the nearest number of frames that the model makes."""
    fps: float | None = None
    """Of the file that is written; the network knows no frame rate."""
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    """Of the second network, where one makes the first steps and another the last."""
    true_cfg_scale: float | None = None
    guidance_rescale: float | None = None
    """How far what guidance adds is brought back to the deviation of the prompt's own prediction, 0 to 1."""
    eta: float | None = None
    """Of DDIM: how much noise each step adds, 0 to 1."""
    clip_skip: int | None = None
    """Layers of a text encoder that are left out, counted from its end."""
    original_size: tuple[int, int] | None = None
    """(height, width) that the network is told, where it is told any; likewise those below."""
    crops_coords_top_left: tuple[int, int] | None = None
    target_size: tuple[int, int] | None = None
    negative_original_size: tuple[int, int] | None = None
    negative_crops_coords_top_left: tuple[int, int] | None = None
    negative_target_size: tuple[int, int] | None = None
    guidance_interval: tuple[float, float] | None = None
    """(from, to) in shares of the steps, e.g. (0.1, 0.8): outside it, the guidance branch is not computed. A loss."""
    sigmas: list[float] | None = None
    """Noise levels instead of `num_inference_steps`, where the scheduler takes them; falling."""
    scheduler: str | None = None
    """Class name of one of diffusers' schedulers, instead of the checkpoint's."""
    strength: float | None = None
    """How much of the given picture is made anew, 0 to 1: where the model begins from a picture."""
    num_images_per_prompt: int = 1
    """Pictures (or videos) of one request: noise of picture i is slice i of what the seed draws, as in diffusers."""
    max_sequence_length: int | None = None
    """Tokens of the prompt that the text encoder sees."""
    step_cache: str | None = None
    """One of `STEP_CACHES`: faster, with a loss. None: exact."""
    step_cache_threshold: float | None = None
    """With `first_block`: the relative change of what the first block adds, up to which the others are not computed
    (None: 0.05). With `teacache`: the sum of rescaled changes up to which no block is (None: the model's own)."""
    progress: bool = False
    """Tell of every step."""
    partial_images: int = 0
    """Previews on the way, evenly spread over the steps."""


FIRST_BLOCK, TAYLORSEER, TEACACHE = "first_block", "taylorseer", "teacache"
STEP_CACHES = (FIRST_BLOCK, TAYLORSEER, TEACACHE)
BLOCK_CACHES = (FIRST_BLOCK, TEACACHE)
"""Of these, those that leave out blocks of a call."""
_ALSO = {"num_videos_per_prompt": "num_images_per_prompt"}
"""Names that pipelines of video have for the same."""
PARAMETERS = frozenset(DiffusionParams.__struct_fields__) | frozenset(_ALSO)
"""What a request may ask for, by name."""
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
"""Far above what any model is sampled with, and far below what makes a picture of no numbers (NaN)."""
_SLOWEST, _FASTEST = 0.01, 1000
"""Frames per second that a file can be written with."""
_NUMBERS = ("guidance_scale", "guidance_scale_2", "true_cfg_scale")


def diffusion_from(values: Mapping[str, Any]) -> DiffusionParams:
    """Checked parameters from what a caller writes; None stands for the default. Raises `InvalidRequest`."""
    given = {name: value for name, value in values.items() if value is not None}
    for also, name in _ALSO.items():
        if also in given:
            value = given.pop(also)
            if given.setdefault(name, value) != value:
                raise wrong(also, value, f"left out beside {name}, which is the same")
    try:
        params = msgspec.convert(given, DiffusionParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise misfit(error) from error
    check_diffusion(params)
    return params


def check_diffusion(params: DiffusionParams) -> None:
    """What is wrong for every model. Raises `InvalidRequest` naming field, value and what would be right."""
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
        raise wrong("seconds", params.seconds, "left out beside num_frames")
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
            right = f"a list of noise levels that begins above 0 and falls (in 32 bits), each from 0 to {_MOST}"
            raise wrong("sigmas", params.sigmas, right)
        if params.num_inference_steps not in (None, len(params.sigmas)):
            right = f"left out beside sigmas, or their number, {len(params.sigmas)}"
            raise wrong("num_inference_steps", params.num_inference_steps, right)


def _check_step_cache(params: DiffusionParams) -> None:
    name = params.step_cache
    if name is not None and name not in STEP_CACHES:
        raise wrong("step_cache", name, f"one of {', '.join(STEP_CACHES)}")
    if params.step_cache_threshold is not None and name not in BLOCK_CACHES:
        raise InvalidRequest(
            f"step_cache_threshold is {params.step_cache_threshold}, but step_cache is {name!r}; it goes with "
            f"{' and '.join(BLOCK_CACHES)}",
            field="step_cache_threshold",
        )


def _in_32_bits(level: float) -> float:
    """As schedulers have it. What is too large for that stays as it is."""
    if not abs(level) <= _MOST:
        return level
    [rounded] = struct.unpack("f", struct.pack("f", level))
    return float(rounded)
