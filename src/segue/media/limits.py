"""Bounds on incoming media, checked before and during decoding."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from segue.messages.errors import ConfigError, InvalidRequest, TooLarge, nearest
from segue.messages.request import MediaPart


class DecodeBudget:
    """The cost so far of decoding the current request's media. Nothing is counted before the first `begin`."""

    def __init__(self) -> None:
        self._counts = False

    def begin(self) -> None:
        """Start counting for another request."""
        self._counts, self._start = True, time.process_time()
        self.decoded = self.kept = 0

    def decode(self, part: MediaPart, pixels: int, limits: MediaLimits) -> None:
        """Count pixels that are about to be decoded (0 for audio). Raises `TooLarge`."""
        if not self._counts:
            return
        self.decoded += pixels
        if self.decoded > limits.max_decoded_pixels:
            raise over(
                part, "max_decoded_pixels", "too many pixels, dropped frames included", limits.max_decoded_pixels
            )
        if time.process_time() - self._start > limits.max_decode_seconds:
            raise over(part, "max_decode_seconds", "too much to decode, in seconds", limits.max_decode_seconds)

    def keep(self, part: MediaPart, pixels: int, limits: MediaLimits) -> None:
        """Count pixels that are about to be held in memory. Raises `TooLarge`."""
        if not self._counts:
            return
        self.kept += pixels
        if self.kept > limits.max_request_pixels:
            has = "too many pixels, together with the media before it"
            raise over(part, "max_request_pixels", has, limits.max_request_pixels)


@dataclass(frozen=True)
class MediaLimits:
    """Bounds per request and per medium; exceeding one raises `TooLarge`, which names the bound."""

    max_items: int = 64
    """Media parts of one request."""
    max_bytes: int = 128 * 2**20
    """Bytes of one part as it arrives (file or raw array)."""
    max_image_pixels: int = 64_000_000
    max_audio_seconds: float = 300.0
    """The feature extractor of the published checkpoints truncates longer audio."""
    max_video_seconds: float = 300.0
    max_video_frames: int = 768
    """Frames after sampling."""
    max_video_pixels: int = 250_000_000
    """Pixels of all sampled frames together, which are in memory at once."""
    max_request_pixels: int = 250_000_000
    """Pixels of all images and sampled frames of a request together."""
    max_decoded_pixels: int = 40_000_000_000
    """Pixels of all decoded images and frames of a request, including frames that are not kept."""
    max_decode_seconds: float = 60.0
    """CPU time of decoding the media of a request."""
    budget: DecodeBudget = field(default_factory=DecodeBudget, compare=False, repr=False)
    """What the current request has used; the code that accepts a request calls its `begin`."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MediaLimits:
        """Limits from a deployment's `limits`; unknown names and impossible values raise `ConfigError`."""
        known = {one.name: type(one.default) for one in fields(cls) if one.name != "budget"}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"limits has no key {name!r}{nearest(name, known)}", field=f"limits.{name}")
            whole = known[name] is int
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or value <= 0:
                right = "a whole number above 0" if whole else "a number above 0"
                raise ConfigError(f"limits.{name} is {value!r}; it must be {right}", field=f"limits.{name}")
        return cls(**options)

    def check_items(self, parts: int, field: str) -> None:
        """Raise `InvalidRequest` for too many media parts. `parts`: their number in the whole request."""
        if parts > self.max_items:
            raise InvalidRequest(
                f"{field} has {parts} media parts; at most {self.max_items} are taken (limits.max_media_parts)",
                field=field,
            )

    def check_bytes(self, part: MediaPart) -> None:
        if len(part.data) > self.max_bytes:
            raise over(part, "max_media_bytes", f"{len(part.data)} bytes", self.max_bytes)


def over(part: MediaPart, limit: str, has: str, bound: float) -> TooLarge:
    """Return the error for a part that exceeds a limit. The message gives integer bounds exactly."""
    most = str(bound) if isinstance(bound, int) else f"{bound:g}"
    return TooLarge(f"{where(part)}: the {part.kind} has {has}; at most {most} ({limit})", field=part.field or None)


def where(part: MediaPart) -> str:
    """Return the name of a part in errors: its position in the client's request."""
    return part.field or part.kind
