"""Pixels into picture files: PNG, WebP, JPEG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from segue.messages.errors import InvalidRequest, TooLarge, nearest

IMAGE_FORMATS: dict[str, str] = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}
"""Format name (OpenAI's) → media type."""
_LONGEST = {"webp": 16_383, "jpeg": 65_500}
"""Pixels that a side may have: WebP's own 14 bits, and what libjpeg writes."""


def check_image_format(name: str, field: str) -> str:
    """The name itself, or `InvalidRequest` that names field and nearest neighbour."""
    if name not in IMAGE_FORMATS:
        raise InvalidRequest(f"{field} is {name!r}, no known image format{nearest(name, IMAGE_FORMATS)}", field=field)
    return name


def check_image_sides(height: int, width: int, name: str, field: str) -> None:
    """Raise `TooLarge` where a file of format `name` cannot hold a picture of so many pixels."""
    most = _LONGEST.get(name)
    if most is not None and max(height, width) > most:
        raise TooLarge(
            f"{field} is {name!r}, and the picture is {width} x {height} pixels; a side of such a file has at most "
            f"{most}: use png, or ask for a smaller size",
            field=field,
        )


def encode_image(data: bytes, height: int, width: int, name: str, quality: int = 100) -> bytes:
    """Raw uint8 RGB, row by row, → a file of format `name` (a key of `IMAGE_FORMATS`).

    `quality`: 0 to 100, of WebP and JPEG; a PNG is always exact. Raises `TooLarge` as `check_image_sides` does.
    """
    check_image_sides(height, width, name, "output_format")
    if len(data) != 3 * height * width:
        raise ValueError(f"a {height}×{width} RGB picture has {3 * height * width} bytes, not {len(data)}")
    # PNG at level 1: three times faster than the default for a few percent of size
    settings = {"compress_level": 1} if name == "png" else {"quality": quality}
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), data).save(file, format=name.upper(), **settings)
    return file.getvalue()


def encode_thumbnail(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """[height, width, 3] uint8 RGB → a WebP file, made smaller only where WebP cannot hold it."""
    image = Image.fromarray(pixels)
    image.thumbnail((_LONGEST["webp"], _LONGEST["webp"]))
    return encode_image(image.tobytes(), image.height, image.width, "webp", 90)
