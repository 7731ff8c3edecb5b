"""What a request says about the image that it wants. No torch here.

The model's own settings are options of a request, under the names of the published code: `cfg_img_scale`,
`cfg_interval`, `cfg_renorm_type`, `cfg_renorm_min`, `timestep_shift`, and `think`. Ours is `interleave`, the number of
images in a reply of texts and images by turns. `guidance_scale` is its
`cfg_text_scale`, `num_inference_steps` its `num_timesteps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge, wrong
from segue.messages.request import Request
from segue.models.omni.bagel.config import Config
from segue.models.omni.bagel.graph import INTERLEAVE, MOST_IMAGES
from segue.models.omni.bagel.prompt.sizes import edited, scaled
from segue.models.shared.diffusion.sizes import Sizes

Renorm = Literal["global", "channel", "text_channel"]
OPTIONS = frozenset(
    {"think", INTERLEAVE, "cfg_img_scale", "cfg_interval", "cfg_renorm_type", "cfg_renorm_min", "timestep_shift"}
)
_TAKES = frozenset(
    {
        *("height", "width", "num_inference_steps", "num_images_per_prompt", "guidance_scale"),
        *("progress", "partial_images"),
    }
)
_SIDE = 1024
"""Height and width in pixels, unless the request says otherwise."""
_TIMESTEPS = 50
_MOST_SCALE = 10_000
_PREVIEWS = 3
"""OpenAI's clients may ask for as many previews whatever the number of steps; with few steps, fewer are sent."""


class Guidance(msgspec.Struct, frozen=True):
    """How far a velocity is pushed away from those without the prompt (`text`) and without the images (`image`)."""

    text: float = 4.0
    """1 or less: no guidance, by images neither."""
    image: float = 1.5
    above: float = 0.4
    """Noise levels in (above, upto] are guided."""
    upto: float = 1.0
    renorm: Renorm = "global"
    """Guided velocities are scaled down to the norm of the unguided: over all numbers of the request, over those of
    each token, or over those of each token after guidance by text only."""
    least: float = 0.0
    """Least factor of this scaling."""

    def applies(self, level: float) -> bool:
        """Whether a step at this noise level is guided."""
        return self.text > 1.0 and self.above < level <= self.upto


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a request for images, complete."""

    height: int
    """Pixels."""
    width: int
    timesteps: int
    """Noise levels from 1 to 0: the network is called at all but the last."""
    count: int
    """Images; they differ in their noise."""
    think: bool
    """The model first writes what it plans to draw."""
    guidance: Guidance
    shift: float
    partial_images: int
    given: tuple[tuple[int, int], ...]
    """(height, width) in latents of each image that is edited: their noise is drawn first."""
    images: int = 0
    """Of a reply of texts and images by turns, which ends with a text; 0: the reply is another."""
    echo: tuple[int, int] = (0, 0)
    """(height, width) in latents of an image of such a reply when it is read again."""

    @property
    def params(self) -> DiffusionParams:
        """As the engine sees them."""
        return DiffusionParams(
            height=self.height,
            width=self.width,
            num_inference_steps=self.timesteps,
            num_images_per_prompt=self.count,
            partial_images=self.partial_images,
        )


class OutputLimits(msgspec.Struct, frozen=True):
    """The deployment's bounds that apply here."""

    max_output_pixels: int = 4_194_304
    max_inference_steps: int = 200
    max_outputs: int = 10

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> OutputLimits:
        """From the options that the worker gives the input stage."""
        given = options.get("output_limits", {})
        return cls(**{name: given[name] for name in cls.__struct_fields__ if name in given})


def sizes_of(config: Config) -> Sizes:
    """The sizes that can be drawn."""
    return Sizes(config.token_pixels, config.latent_side * config.token_pixels)


def drawing_of(request: Request, config: Config, limits: OutputLimits, images: list[tuple[int, int]]) -> Drawing:
    """The settings of a request. `images`: (height, width) in pixels of those that are edited, as the VAE sees them;
    the output is as large as the last one unless the request says otherwise. Raises `InvalidRequest` with the field."""
    params = request.diffusion or DiffusionParams()
    neutral = DiffusionParams()
    for name in DiffusionParams.__struct_fields__:
        if name not in _TAKES and getattr(params, name) != getattr(neutral, name):
            raise InvalidRequest(f"this model takes no {name}; it takes {', '.join(sorted(_TAKES))}", field=name)
    sizes = sizes_of(config)
    side = min(_SIDE, config.latent_side * config.token_pixels)
    height, width = images[-1] if images else (side, side)
    height, width = params.height or height, params.width or width
    sizes.check(height, width, limits.max_output_pixels)
    timesteps = params.num_inference_steps or _TIMESTEPS
    for name, value, most, limit in (
        ("num_inference_steps", timesteps, limits.max_inference_steps, "max_inference_steps"),
        ("num_images_per_prompt", params.num_images_per_prompt, limits.max_outputs, "max_outputs"),
    ):
        if value > most:
            raise TooLarge(f"{name} is {value}; at most {most} ({limit})", field=name)
    if timesteps < 2:
        raise wrong("num_inference_steps", timesteps, "at least 2: the model is called once less")
    if params.partial_images > max(_PREVIEWS, timesteps - 2):
        raise wrong("partial_images", params.partial_images, f"at most {timesteps - 2}, one less than its calls")
    think, interleaved = thinks(request), _images(request, params.num_images_per_prompt, limits)
    scale = config.vae.downsample
    across, down = scaled(width, height, edited(config))
    return Drawing(
        height=height,
        width=width,
        timesteps=timesteps,
        count=params.num_images_per_prompt,
        think=think,
        guidance=_guidance(params.guidance_scale, request.options),
        shift=_number(request.options, "timestep_shift", 3.0, least=0.0, above=True),
        partial_images=params.partial_images,
        given=tuple((height // scale, width // scale) for height, width in images),
        images=interleaved,
        echo=(down // scale, across // scale),
    )


def thinks(request: Request) -> bool:
    """Whether to think first: by default if the client wants text, which is what the model thinks."""
    texts = "text" in request.modalities
    think = request.options.get("think", texts)
    if not isinstance(think, bool):
        raise wrong("options.think", think, "true or false")
    if texts and not think:
        raise InvalidRequest(
            "options.think is false, but modalities has text and image: the text of an image is what the model thinks "
            "before it draws; leave out one of them",
            field="options.think",
        )
    return think


def _images(request: Request, count: int, limits: OutputLimits) -> int:
    """The number of images in a reply of texts and images by turns; 0: it is another."""
    if INTERLEAVE not in request.options:
        return 0
    images, field = request.options[INTERLEAVE], f"options.{INTERLEAVE}"
    most = min(limits.max_outputs, MOST_IMAGES)
    if isinstance(images, bool) or not isinstance(images, int) or images < 1:
        raise wrong(field, images, "a number of images, at least 1")
    if images > most:
        raise TooLarge(f"{field} is {images}; at most {most}", field=field)
    if "text" not in request.modalities:
        raise InvalidRequest(f"{field} is given, but modalities has no text: name text and image", field=field)
    if count > 1:
        raise wrong("num_images_per_prompt", count, f"1: {field} is the number of images")
    return images


def _guidance(scale: float | None, options: Mapping[str, Any]) -> Guidance:
    usual = Guidance()
    interval = options.get("cfg_interval", (usual.above, usual.upto))
    pair = isinstance(interval, list | tuple) and len(interval) == 2 and all(map(_is_number, interval))
    if not pair or not 0 <= interval[0] <= interval[1] <= 1:
        raise wrong("options.cfg_interval", interval, "[from, to], two noise levels with 0 <= from <= to <= 1")
    renorm = options.get("cfg_renorm_type", usual.renorm)
    if renorm not in get_args(Renorm):
        raise wrong("options.cfg_renorm_type", renorm, f"one of {', '.join(get_args(Renorm))}")
    return Guidance(
        text=usual.text if scale is None else scale,
        image=_number(options, "cfg_img_scale", usual.image),
        above=interval[0],
        upto=interval[1],
        renorm=renorm,
        least=_number(options, "cfg_renorm_min", usual.least, most=1.0),
    )


def _number(
    options: Mapping[str, Any],
    name: str,
    usual: float,
    *,
    least: float = 0.0,
    most: float = _MOST_SCALE,
    above: bool = False,
) -> float:
    value = options.get(name, usual)
    if not _is_number(value) or not least <= value <= most or (above and value == least):
        raise wrong(
            f"options.{name}", value, f"a number {'above' if above else 'of at least'} {least:g}, and at most {most:g}"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
