"""Decode masks, which select the part of an image to repaint.

There are two formats (`MediaPart.role`): `MASK_IMAGE`, from the pipelines, is white where the image is repainted;
`MASK`, from OpenAI, has the size of the image itself and is fully transparent there.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from segue.media.image import decode_alpha, decode_image
from segue.media.limits import MediaLimits
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart
from segue.models.shared.diffusion.library import VaeImageProcessor

MASK, MASK_IMAGE = "mask", "mask_image"
MASKS = frozenset({MASK, MASK_IMAGE})
_PROCESSOR = VaeImageProcessor(vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True)


def mask_image(part: MediaPart, size: tuple[int, int] | None, limits: MediaLimits) -> Image.Image:
    """A part whose role is in `MASKS` → an image that is white where the input image is repainted. `size`: (width,
    height) of the input image; None: there is none. Raises `InvalidRequest` with the part's name."""
    name = part.field or part.role
    if size is None:
        raise InvalidRequest(f"{name} selects the part of an image to repaint; the request has no image", field=name)
    if part.role == MASK_IMAGE:
        return Image.fromarray(decode_image(part, limits))
    alpha = decode_alpha(part, limits)
    height, width = alpha.shape
    if (width, height) != size:
        raise InvalidRequest(
            f"{name} is {width} x {height} pixels; it must be as large as the image, {size[0]} x {size[1]}",
            field=name,
        )
    if alpha.min() > 0:
        raise InvalidRequest(f"{name} is nowhere fully transparent; the image is repainted where it is", field=name)
    return Image.fromarray(np.where(alpha == 0, 255, 0).astype(np.uint8))


def mask_latents(mask: Image.Image, height: int, width: int, scale: int) -> torch.Tensor:
    """The mask as [h, w] of latents, 1 where they are repainted, else 0. `height`, `width`: pixels of the output;
    `scale`: pixels per latent."""
    pixels = _PROCESSOR.preprocess(mask, height=height, width=width)
    return functional.interpolate(pixels, size=(height // scale, width // scale))[0, 0]
