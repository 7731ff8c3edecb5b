"""The file formats that a client may ask for instead of raw samples, pixels and frames.

Optional reading: the files that clients may ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from segue.messages.errors import InvalidRequest, TooLarge, nearest, wrong

AUDIO_FORMATS: dict[str, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}
"""Format name (OpenAI's) → media type. `pcm16`: little-endian 16-bit mono without a header."""

IMAGE_FORMATS: dict[str, str] = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}
"""The same of images."""

VIDEO_FORMATS: dict[str, str] = {"mp4": "video/mp4"}
"""The same of videos."""

FORMATS: Mapping[str, Mapping[str, str]] = {"audio": AUDIO_FORMATS, "image": IMAGE_FORMATS, "video": VIDEO_FORMATS}
"""Modality → the names of its formats → media type."""

LONGEST = {"webp": 16_383, "jpeg": 65_500, "mp4": 16_384}
"""Most pixels of a side: WebP stores 14 bits; the others are limits of libjpeg and x264."""
SLOWEST, FASTEST = 0.25, 4.0
"""OpenAI's bounds of `speed`."""
_RATES = 8000, 48_000


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a modality's files."""

    name: str
    """A key of its modality in `FORMATS`."""
    rate: int | None = None
    """Audio: samples per second; None: those of the model, or the codec's next higher rate."""
    speed: float = 1.0
    """Audio: 2 is twice as fast, with the same pitch."""
    whole: bool = False
    """Audio: the file is made at the end of the request, so that its header states its length."""
    quality: int = 100
    """WebP and JPEG: 0 to 100."""
    base64: bool = False
    """The bytes are the base64 text of the file, in pieces that each decode by themselves."""
    poster: bool = False
    """Video: its first frame, as a WebP file, precedes it (kind `poster`)."""
    fragmented: bool = False
    """Video: the file has a fragment for each frame, and is sent while it is made; else its index stands first, and it
    is sent when it is complete."""
    part: int = 0
    """Audio: number of preceding files that the client joins with this one. Later ones have no header that could be
    there only once."""


def check_formats(formats: Mapping[str, Format], modalities: Collection[str]) -> None:
    """Raise `InvalidRequest`, naming the field, for a format that cannot be made."""
    for modality, form in formats.items():
        field = f"formats.{modality}"
        known = FORMATS.get(modality)
        if known is None:
            raise InvalidRequest(
                f"{field} is given, but there are no files of {modality!r}{nearest(modality, FORMATS)}", field=field
            )
        previews = modality == "image" and "video" in modalities
        if modality not in modalities and not previews:
            raise InvalidRequest(f"{field} is given, but modalities has no {modality!r}", field=field)
        if form.name not in known:
            raise wrong(f"{field}.name", form.name, f"one of {', '.join(known)}{nearest(form.name, known)}")
        if not SLOWEST <= form.speed <= FASTEST:
            raise wrong(f"{field}.speed", form.speed, f"a number from {SLOWEST:g} to {FASTEST:g}")
        if form.rate is not None and not _RATES[0] <= form.rate <= _RATES[1]:
            raise wrong(f"{field}.rate", form.rate, f"from {_RATES[0]} to {_RATES[1]} samples per second")
        if not 0 <= form.quality <= 100:
            raise wrong(f"{field}.quality", form.quality, "from 0 to 100")
        if form.part < 0:
            raise wrong(f"{field}.part", form.part, "at least 0")


def check_audio_format(name: str, field: str) -> str:
    """Return the name itself, or raise `InvalidRequest` naming field and nearest neighbour."""
    if name not in AUDIO_FORMATS:
        raise InvalidRequest(f"{field} is {name!r}, no known audio format{nearest(name, AUDIO_FORMATS)}", field=field)
    return name


def check_image_format(name: str, field: str) -> str:
    """Return the name itself, or raise `InvalidRequest` naming field and nearest neighbour."""
    if name not in IMAGE_FORMATS:
        raise InvalidRequest(f"{field} is {name!r}, no known image format{nearest(name, IMAGE_FORMATS)}", field=field)
    return name


def check_image_sides(height: int, width: int, name: str, field: str) -> None:
    """Raise `TooLarge` if a file of format `name` cannot hold an image of this size."""
    most = LONGEST.get(name)
    if most is not None and max(height, width) > most:
        raise TooLarge(
            f"{field} is {name!r}, and the image is {width} x {height} pixels; a side of such a file has at most "
            f"{most}: use png, or ask for a smaller size",
            field=field,
        )


def check_video_sides(height: int, width: int, field: str) -> None:
    """Raise `TooLarge` if an MP4 cannot hold frames of this size."""
    if max(height, width) > (most := LONGEST["mp4"]):
        raise TooLarge(
            f"frames of {width} x {height} pixels; a side of a video has at most {most}: ask for a smaller size",
            field=field,
        )
