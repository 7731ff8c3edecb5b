"""Masks: which part of a picture is made anew.

There are two ways to write one (`MediaPart.role`): `MASK_IMAGE`, the pipelines', is a picture that is white there;
`MASK`, OpenAI's, has the size of the picture itself and is fully transparent there.
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
from segue.models.diffusion.library import VaeImageProcessor

MASK, MASK_IMAGE = "mask", "mask_image"
MASKS = frozenset({MASK, MASK_IMAGE})
_PROCESSOR = VaeImageProcessor(vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True)


def mask_picture(part: MediaPart, size: tuple[int, int] | None, limits: MediaLimits) -> Image.Image:
    """A part of a role in `MASKS` → white where the picture is made anew. `size`: (width, height) of the picture; None:
    there is none. Raises `InvalidRequest` naming the part."""
    name = part.field or part.role
    if size is None:
        raise InvalidRequest(f"{name} says which part of a picture is made anew; the request has none", field=name)
    if part.role == MASK_IMAGE:
        return Image.fromarray(decode_image(part, limits))
    alpha = decode_alpha(part, limits)
    height, width = alpha.shape
    if (width, height) != size:
        raise InvalidRequest(
            f"{name} is {width} x {height} pixels; it must be as large as the picture, {size[0]} x {size[1]}",
            field=name,
        )
    if alpha.min() > 0:
        raise InvalidRequest(f"{name} is nowhere fully transparent; where it is, the picture is made anew", field=name)
    return Image.fromarray(np.where(alpha == 0, 255, 0).astype(np.uint8))


def mask_latents(mask: Image.Image, height: int, width: int, scale: int) -> torch.Tensor:
    """[h, w] of latents, 1 where they are made anew, 0 elsewhere. `height`, `width`: pixels of what is made; `scale`:
    pixels per latent."""
    pixels = _PROCESSOR.preprocess(mask, height=height, width=width)
    return functional.interpolate(pixels, size=(height // scale, width // scale))[0, 0]
