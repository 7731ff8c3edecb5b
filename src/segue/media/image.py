"""Decode images: any common file format, or a raw array, to uint8 RGB. The directory of a TIFF file, or of an image's
EXIF data, is checked before Pillow reads it."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from segue.media.decode import raw_array, refuse
from segue.media.limits import MediaLimits, over
from segue.messages.errors import InvalidRequest
from segue.messages.request import ArrayInfo, MediaPart

_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""TIFF's value type → bytes per value."""
_MOST_NUMBERS = 1 << 20
"""Most numbers in one entry, as each becomes a Python object. The largest images have fewer strips and tiles."""


def check_directory(part: MediaPart, data: bytes) -> None:
    """Raise `InvalidRequest` for a directory whose entries together are larger than the data: many entries may point at
    the same bytes, which Pillow copies for each. Data without a directory pass."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None or len(data) < 16:
        return
    big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
    at = struct.unpack_from(f"{order}Q", data, 8)[0] if big else struct.unpack_from(f"{order}I", data, 4)[0]
    head, entry = (f"{order}Q", f"{order}HHQQ") if big else (f"{order}H", f"{order}HHII")
    if at + struct.calcsize(head) > len(data):
        return
    [count] = struct.unpack_from(head, data, at)
    first, size = at + struct.calcsize(head), struct.calcsize(entry)
    whole = 0
    for place in range(first, min(first + count * size, len(data) - size + 1), size):
        _, kind, numbers, _ = struct.unpack_from(entry, data, place)
        width = _BYTES.get(kind, 1)
        whole += numbers * width
        if width > 1 and numbers > _MOST_NUMBERS:
            raise refuse(part, f"an entry of its metadata has {numbers} numbers; at most {_MOST_NUMBERS} are read")
        if whole > len(data):
            raise refuse(part, "the entries of its metadata are larger than the file; save the image again")


# left out on purpose: formats that Pillow passes to other programs (EPS)
_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA")
# exceptions of Pillow's readers on broken files
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,  # from the AVIF plugin
    struct.error,
    zlib.error,
)
_SEND = "send e.g. JPEG, PNG or WebP"
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → the transpose that makes the image upright. `ImageOps.exif_transpose` does the same, but also
rewrites all EXIF data."""
_SCANS, _SCANNED_PIXELS = 64, 2 * 10**10
"""An image with more scans than the first number is refused if scans × pixels exceed the second."""


def decode_image(part: MediaPart, limits: MediaLimits) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A part of kind `image` → [height, width, 3] uint8 RGB, upright.

    An animation gives its first frame. Transparency is dropped and palettes and CMYK are converted as
    `PIL.Image.convert("RGB")` does (and so `transformers.image_utils.load_image`); 16-bit grey is scaled to 8 bits.

    Raises `InvalidRequest` for data that are not an image, `TooLarge` over `max_bytes` or `max_image_pixels`.
    """
    if part.array is not None:
        limits.check_bytes(part)
        return _from_array(part, part.array, limits)
    return _read(part, limits, _colours)


def decode_alpha(part: MediaPart, limits: MediaLimits) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the alpha channel of an image file: [height, width] uint8, 0 for fully transparent.

    Raises like `decode_image`, and `InvalidRequest` for an image without transparency.
    """

    def alpha(upright: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if not upright.has_transparency_data:
            raise refuse(part, "no pixel is transparent: the file has no alpha channel; send e.g. an RGBA PNG")
        return np.array(upright.convert("RGBA").getchannel("A"))

    return _read(part, limits, alpha)


def _read(
    part: MediaPart, limits: MediaLimits, taken: Callable[[Image.Image], np.ndarray[Any, np.dtype[np.uint8]]]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Open a part's file, make the image upright, and return what `taken` makes of it."""
    limits.check_bytes(part)
    if not part.data:
        raise refuse(part, f"the image is empty; {_SEND}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # broken metadata do not matter if the image can be read
        # some files embed another image, whose size is known only when it is opened
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return taken(_from_file(part, limits))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise over(part, "max_image_pixels", "too many pixels to open", limits.max_image_pixels) from error
        except InvalidRequest:
            raise
        except UnidentifiedImageError as error:
            raise refuse(
                part, f"not a readable image file (of no known format); {_SEND}"
            ) from error  # its text is a memory address
        except _BROKEN as error:
            raise refuse(part, f"not a readable image file ({error}); {_SEND}") from error


def _from_file(part: MediaPart, limits: MediaLimits) -> Image.Image:
    check_directory(part, part.data)
    with Image.open(io.BytesIO(part.data), formats=_FORMATS) as image:
        # only the header has been read here, not the pixels
        _check_pixels(part, image.width, image.height, limits)
        if image.format in ("JPEG", "MPO"):
            _check_scans(part, image.width * image.height)
        check_directory(part, image.info.get("exif", b"").removeprefix(b"Exif\0\0"))
        limits.budget.decode(part, image.width * image.height, limits)
        image.load()
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        upright = image.copy() if turn is None else image.transpose(turn)
    limits.budget.decode(part, 0, limits)
    return upright


def _check_scans(part: MediaPart, pixels: int) -> None:
    """Refuse a progressive JPEG with too many scans: each goes over all pixels, and one that changes none takes only a
    few bytes. Scan markers occur in metadata too, so many are allowed if they cost little."""
    scans = part.data.count(b"\xff\xda")
    if scans > _SCANS and scans * pixels > _SCANNED_PIXELS:
        raise refuse(part, f"the image has {scans} scans; progressive JPEGs have about 10: save it again")


def _colours(upright: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if upright.mode.startswith("I"):  # 16 bits per sample (Pillow opens some as 32)
        upright = Image.fromarray((np.asarray(upright).astype(np.uint32).clip(0, 65535) >> 8).astype(np.uint8))
    return np.array(upright.convert("RGB"))


def _check_pixels(part: MediaPart, width: int, height: int, limits: MediaLimits) -> None:
    if width <= 0 or height <= 0:
        raise refuse(part, f"the image is {width} × {height} pixels; it needs at least one")
    if width * height > limits.max_image_pixels:
        raise over(part, "max_image_pixels", f"{width} × {height} pixels", limits.max_image_pixels)
    limits.budget.keep(part, width * height, limits)


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
