"""Pixels into picture files: PNG, WebP, JPEG."""

from __future__ import annotations

import io

from PIL import Image

from segue.messages.errors import InvalidRequest, nearest

IMAGE_FORMATS: dict[str, str] = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}
"""Format name (OpenAI's) → media type."""


def check_image_format(name: str, field: str) -> str:
    """The name itself, or `InvalidRequest` that names field and nearest neighbour."""
    if name not in IMAGE_FORMATS:
        raise InvalidRequest(f"{field} is {name!r}, no known image format{nearest(name, IMAGE_FORMATS)}", field=field)
    return name


def encode_image(data: bytes, height: int, width: int, name: str, quality: int = 100) -> bytes:
    """Raw uint8 RGB, row by row, → a file of format `name` (a key of `IMAGE_FORMATS`).

    `quality`: 0 to 100, of WebP and JPEG; a PNG is always exact.
    """
    if len(data) != 3 * height * width:
        raise ValueError(f"a {height}×{width} RGB picture has {3 * height * width} bytes, not {len(data)}")
    # PNG at level 1: three times faster than the default for a few percent of size
    settings = {"compress_level": 1} if name == "png" else {"quality": quality}
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), data).save(file, format=name.upper(), **settings)
    return file.getvalue()
