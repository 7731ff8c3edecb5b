"""The mixed multimodal workload: text, image, audio and video in equal parts, the same requests for every side.

Request `i` is of kind `KINDS[i % 4]` and is answered with `REPLY_TOKENS[i % 32]` text tokens, and for each of them with
as many codes as `segue.bench.omni.families` says.
The tables below are frozen: figures of two runs are comparable only while the tables stay the same. Media are cut from
the files of the repository's `assets/`, at a different offset for each request, so that no content cache sees an image
twice; prompts differ in their words. All media are arrays: decoding files counts to no side's time, the processor's
work on the arrays counts to every side's.

End tokens, codes that the vocoder has no embedding for and media placeholders are suppressed on every side, so that
lengths match the table and every side does the same work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from segue.media.audio import decode_audio
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.errors import ConfigError
from segue.messages.request import ArrayInfo, MediaPart, Message, TextPart

Kind = Literal["text", "image", "audio", "video"]

KINDS: tuple[Kind, ...] = ("text", "image", "audio", "video")
# 32 to 96 tokens; the mean of each kind's eight lengths is 64
REPLY_TOKENS = (
    *(64, 40, 88, 56), *(32, 96, 48, 72), *(96, 32, 64, 88), *(48, 80, 40, 64),
    *(80, 48, 72, 32), *(56, 64, 96, 40), *(72, 88, 56, 96), *(64, 64, 48, 64),
)  # fmt: skip

IMAGE_SIDES = (168, 196, 224)
"""Pixels of the square crop: 36 to 64 prompt tokens."""
AUDIO_SECONDS = (2, 3, 4)
"""25 prompt tokens each."""
AUDIO_RATE = 16_000
VIDEO_SIDE = 112
VIDEO_FRAMES = 4
VIDEO_FPS = 2.0
"""The published processor's sampling rate: two seconds, and some 290 prompt tokens (it enlarges the frames)."""
CLIP_STRIDE = 6
_CLIP_FPS = VIDEO_FPS * CLIP_STRIDE
"""Frame rate at which the clip is read; every sixth frame is used, so that cuts may begin at different times."""

_SUBJECTS = ("the harbour", "a violin", "this winter", "the old bridge", "my garden", "the night train", "a red kite")
_TASKS = ("Tell me about", "What do you think of", "Describe in a few sentences", "Write a short note on")
_ASKS: dict[Kind, str] = {
    "text": "",
    "image": "Here is an image. Say what it shows, then go on:",
    "audio": "Here is a recording. Say what you hear, then go on:",
    "video": "Here is a clip. Say what happens in it, then go on:",
}


class BenchRequest(msgspec.Struct, frozen=True):
    """One request of the workload."""

    index: int
    kind: Kind
    messages: list[Message]
    reply_tokens: int
    codes: int
    """Number of the talker's codes, or rows of codes."""


@dataclass(frozen=True)
class Material:
    """The source files of the media."""

    photo: np.ndarray[Any, np.dtype[np.uint8]]
    """[height, width, 3]."""
    speech: np.ndarray[Any, np.dtype[np.float32]]
    """[samples] at 16 kHz."""
    clip: np.ndarray[Any, np.dtype[np.uint8]]
    """[frames, height, width, 3]."""

    @classmethod
    def read(cls, assets: Path) -> Material:
        """Read `photo.jpg`, `speech.wav` and `video.mp4` of a directory. Raises `ConfigError` if one is missing."""
        limits = MediaLimits()
        photo = decode_image(_file(assets, "photo.jpg", "image"), limits)
        speech = decode_audio(_file(assets, "speech.wav", "audio"), AUDIO_RATE, limits)
        clip = decode_video(_file(assets, "video.mp4", "video"), _CLIP_FPS, limits).frames
        return cls(photo, np.asarray(speech, np.float32), clip)


def _file(assets: Path, name: str, kind: Literal["image", "audio", "video"]) -> MediaPart:
    path = assets / name
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is missing; --assets must be the repository's assets/", field="assets")
    return MediaPart(kind, path.read_bytes(), field=f"assets/{name}")


class Workload:
    """All requests by index; equal arguments give equal requests."""

    kinds: Sequence[Kind] = KINDS
    name = "mixed"
    count = 16
    """Requests per round, unless the user says otherwise."""

    def __init__(self, material: Material, seed: int = 0, *, codes_per_token: int = 4) -> None:
        self._material = material
        self._seed = seed
        self._codes_per_token = codes_per_token

    def request(self, index: int) -> BenchRequest:
        """The request of an index from 0."""
        kind = self.kinds[index % len(self.kinds)]
        draw = random.Random(f"{self._seed}/{index}")
        media = {"image": self._image, "audio": self._audio, "video": self._video}
        parts: list[MediaPart | TextPart] = [media[kind](draw)] if kind in media else []
        topic = f"{draw.choice(_TASKS)} {draw.choice(_SUBJECTS)}, number {index}."
        parts.append(TextPart(f"{_ASKS[kind]} {topic}".strip()))
        tokens = REPLY_TOKENS[index % len(REPLY_TOKENS)]
        return BenchRequest(index, kind, [Message("user", list(parts))], tokens, self._codes_per_token * tokens)

    def requests(self, start: int, count: int) -> list[BenchRequest]:
        return [self.request(index) for index in range(start, start + count)]

    def _image(self, draw: random.Random) -> MediaPart:
        side = draw.choice(IMAGE_SIDES)
        height, width, _ = self._material.photo.shape
        top, left = draw.randrange(height - side + 1), draw.randrange(width - side + 1)
        return medium("image", self._material.photo[top : top + side, left : left + side])

    def _audio(self, draw: random.Random) -> MediaPart:
        return spoken(self._material, draw.choice(AUDIO_SECONDS) * AUDIO_RATE, draw)

    def _video(self, draw: random.Random) -> MediaPart:
        count, height, width, _ = self._material.clip.shape
        top, left = draw.randrange(height - VIDEO_SIDE + 1), draw.randrange(width - VIDEO_SIDE + 1)
        last = (VIDEO_FRAMES - 1) * CLIP_STRIDE
        first = draw.randrange(count - last)
        shown = self._material.clip[first : first + last + 1 : CLIP_STRIDE]
        return medium("video", shown[:, top : top + VIDEO_SIDE, left : left + VIDEO_SIDE], VIDEO_FPS)


def medium(kind: Literal["image", "audio", "video"], array: np.ndarray, rate: float | None = None) -> MediaPart:
    """A medium of a request, from an array of its dtype and shape."""
    info = ArrayInfo(array.dtype.name, array.shape, rate)
    return MediaPart(kind, np.ascontiguousarray(array).tobytes(), info, "messages[0].content[0]")


def spoken(material: Material, samples: int, draw: random.Random) -> MediaPart:
    """The speech in a loop, from a random position, of so many samples."""
    speech = np.roll(material.speech, -draw.randrange(len(material.speech)))
    return medium("audio", np.resize(speech, samples).astype("<f4"), float(AUDIO_RATE))
