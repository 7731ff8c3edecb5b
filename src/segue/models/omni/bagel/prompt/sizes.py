"""The sizes to which images are scaled before the model sees them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from segue.models.omni.bagel.config import Config

_MOST_PIXELS = 1_806_336
"""1344 × 1344."""
_LEAST_EDITED = 512
_LEAST_SEEN = 224


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an image's sides in pixels."""

    least: int
    """The shorter side is at least this, unless the longer one would exceed `most`."""
    most: int
    multiple: int
    """Both sides are multiples of this."""


def edited(config: Config) -> Limits:
    """Of an image that is edited: it passes through the VAE."""
    return Limits(_LEAST_EDITED, config.latent_side * config.token_pixels, config.token_pixels)


def seen(config: Config) -> Limits:
    """Of an image that is looked at: it passes through the vision tower, after it was scaled by `edited`."""
    return Limits(_LEAST_SEEN, config.vit.image_size, config.vit.patch_size)


def scaled(width: int, height: int, limits: Limits) -> tuple[int, int]:
    """The size to which an image of this size is scaled, its aspect ratio kept as far as `multiple` allows."""
    scale = max(min(limits.most / max(width, height), 1.0), limits.least / min(width, height))
    size = _times(width, height, scale, limits.multiple)
    if (pixels := size[0] * size[1]) > _MOST_PIXELS:
        size = _times(*size, _MOST_PIXELS / pixels, limits.multiple)
    if max(size) > limits.most:
        size = _times(*size, limits.most / max(size), limits.multiple)
    return size


def _times(width: int, height: int, scale: float, multiple: int) -> tuple[int, int]:
    """Both sides times `scale`, rounded to whole pixels, then to the nearest multiple."""
    sides = (round(round(side * scale) / multiple) * multiple for side in (width, height))
    across, down = (max(multiple, side) for side in sides)
    return across, down
