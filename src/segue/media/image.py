"""Pictures in: any common file format, or a raw array, to uint8 RGB."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from segue.media.decode import raw_array, refuse
from segue.media.limits import MediaLimits, over
from segue.messages.errors import InvalidRequest
from segue.messages.request import ArrayInfo, MediaPart

# not among them on purpose: formats that Pillow hands to other programs (EPS)
_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA")
# what Pillow's readers raise on broken files
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,  # of the AVIF plugin
    struct.error,
    zlib.error,
)
_SEND = "send e.g. JPEG, PNG or WebP"


def decode_image(part: MediaPart, limits: MediaLimits) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A part of kind `image` → [height, width, 3] uint8 RGB, upright.

    Of animations the first frame. Transparency is dropped and palettes and CMYK are converted as
    `PIL.Image.convert("RGB")` does (and so `transformers.image_utils.load_image`); 16-bit grey is scaled to 8 bits.

    Raises `InvalidRequest` for what is no picture, `TooLarge` over `max_bytes` or `max_image_pixels`.
    """
    if part.array is not None:
        limits.check_bytes(part)
        return _from_array(part, part.array, limits)
    return _read(part, limits, _colours)


def decode_alpha(part: MediaPart, limits: MediaLimits) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """How opaque each pixel of a picture file is: [height, width] uint8, 0 for fully transparent.

    Raises as `decode_image` does, and `InvalidRequest` for a picture without transparency.
    """

    def alpha(upright: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if not upright.has_transparency_data:
            raise refuse(part, "no pixel is transparent: the file has no alpha channel; send e.g. an RGBA PNG")
        return np.array(upright.convert("RGBA").getchannel("A"))

    return _read(part, limits, alpha)


def _read(
    part: MediaPart, limits: MediaLimits, taken: Callable[[Image.Image], np.ndarray[Any, np.dtype[np.uint8]]]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What is taken of the file of a part, upright."""
    limits.check_bytes(part)
    if not part.data:
        raise refuse(part, f"the image is empty; {_SEND}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # broken metadata is not the client's problem while the picture can be read
        try:
            return taken(_from_file(part, limits))
        except Image.DecompressionBombError as error:
            raise over(part, "max_image_pixels", "too many pixels to be opened", limits.max_image_pixels) from error
        except InvalidRequest:
            raise
        except UnidentifiedImageError as error:
            raise refuse(
                part, f"not a readable image file (of no known format); {_SEND}"
            ) from error  # its text is an address
        except _BROKEN as error:
            raise refuse(part, f"not a readable image file ({error}); {_SEND}") from error


def _from_file(part: MediaPart, limits: MediaLimits) -> Image.Image:
    with Image.open(io.BytesIO(part.data), formats=_FORMATS) as image:
        _check_pixels(part, image.width, image.height, limits)  # the header is read, the pixels are not
        image.load()
        return ImageOps.exif_transpose(image)


def _colours(upright: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if upright.mode.startswith("I"):  # 16 bits per sample (Pillow opens some of them as 32)
        upright = Image.fromarray((np.asarray(upright).astype(np.uint32).clip(0, 65535) >> 8).astype(np.uint8))
    return np.array(upright.convert("RGB"))


def _check_pixels(part: MediaPart, width: int, height: int, limits: MediaLimits) -> None:
    if width <= 0 or height <= 0:
        raise refuse(part, f"the image is {width} × {height} pixels; it needs at least one")
    if width * height > limits.max_image_pixels:
        raise over(part, "max_image_pixels", f"{width} × {height} pixels", limits.max_image_pixels)


def _from_array(part: MediaPart, info: ArrayInfo, limits: MediaLimits) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array = raw_array(part, info)
    grey = array.ndim == 2
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        raise refuse(part, f"an image of {array.dtype} {array.shape}; it must be uint8 (height, width, 3)")
    _check_pixels(part, array.shape[1], array.shape[0], limits)
    if grey:
        array = array[:, :, None]
    if array.shape[2] == 1:
        return np.repeat(array, 3, axis=2)
    return array[:, :, :3].copy()
