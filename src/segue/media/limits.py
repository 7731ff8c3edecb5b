"""What may come in: bounds on media, checked before and while they are decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from segue.messages.errors import ConfigError, TooLarge, nearest
from segue.messages.request import MediaPart


@dataclass(frozen=True)
class MediaLimits:
    """Bounds per request and per medium; what is over one is refused with `TooLarge`, which names the bound."""

    max_items: int = 64
    """Media parts of one request."""
    max_bytes: int = 128 * 2**20
    """Bytes of one part as it arrives (file or raw array)."""
    max_image_pixels: int = 64_000_000
    max_audio_seconds: float = 300.0
    """The feature extractor of the published checkpoints cuts off what is longer."""
    max_video_seconds: float = 300.0
    max_video_frames: int = 768
    """Frames after sampling."""
    max_video_pixels: int = 250_000_000
    """Pixels of all sampled frames together: what is held in memory at once."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MediaLimits:
        """Limits from a deployment's `limits`; unknown names and impossible values raise `ConfigError`."""
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"limits has no key {name!r}{nearest(name, known)}", field=f"limits.{name}")
            whole = known[name] is int
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or value <= 0:
                right = "a whole number above 0" if whole else "a number above 0"
                raise ConfigError(f"limits.{name} is {value!r}; it must be {right}", field=f"limits.{name}")
        return cls(**options)

    def check_items(self, parts: int, field: str) -> None:
        """`parts`: media parts of the whole request."""
        if parts > self.max_items:
            raise TooLarge(f"{field} has {parts} media parts; at most {self.max_items} (max_items)", field=field)

    def check_bytes(self, part: MediaPart) -> None:
        if len(part.data) > self.max_bytes:
            raise over(part, "max_media_bytes", f"{len(part.data)} bytes", self.max_bytes)


def over(part: MediaPart, limit: str, has: str, bound: float) -> TooLarge:
    """The error of a part that is over a limit. A bound of whole numbers is said to the last digit."""
    most = str(bound) if isinstance(bound, int) else f"{bound:g}"
    return TooLarge(f"{where(part)}: the {part.kind} has {has}; at most {most} ({limit})", field=part.field or None)


def where(part: MediaPart) -> str:
    """How errors call a part: where in the client's request it stood."""
    return part.field or part.kind
