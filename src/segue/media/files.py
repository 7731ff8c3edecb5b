"""Make the files of a request, in the formats that its client asked for, from samples, pixels and frames as they come.

A *part* is a piece of an output: `{"kind", "output", "start", "data", …}`. `data` is an array [units, …]: float32
samples in [-1, 1], or uint8 RGB images [height, width, 3]; `start` units of this output precede it. Other entries:
`sample_rate` of audio, latent `tokens` of an image, `fps` of a video. A file's bytes depend on its units alone, not on
how they are split into parts, nor on parts that come twice: that is what makes a file restartable.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segue.media.audio_file import AudioFile
from segue.media.encode import encode_image, encode_thumbnail
from segue.media.fragmented_video import VideoFragments
from segue.media.write_video import VideoMuxer
from segue.messages.deltas import EncodedDelta
from segue.messages.formats import FORMATS, Format

Part = Mapping[str, Any]
Key = tuple[str, str, int]
"""(stage, kind, output)"""
Facts = dict[str, int | float]

PREVIEW = "preview"
"""The kind of previews of an unfinished image; they have the image's format, and number `start`."""
POSTER = "poster"
"""The kind of a video's first frame."""
BASE64_BYTES = 6
"""Pieces of base64 are made of a multiple of this, so that each decodes by itself, to whole 16-bit samples."""
FRAMES = 8
"""Most frames of a video that are encoded at once."""
_PIECE = 1 << 20
"""Bytes of a video per `EncodedDelta`."""
SILENCE_RATE = 24_000
"""Samples per second of a whole audio file without samples."""


@dataclass(slots=True)
class _Audio:
    """An audio file that is being made."""

    file: AudioFile
    sample_rate: int
    seconds: float = 0.0

    @property
    def facts(self) -> Facts:
        return {"sample_rate": self.sample_rate, "seconds": self.seconds}


class _Video:
    """A video file that is being made. It is on disk, without a name, since its index comes last and stands first."""

    def __init__(self, fps: float, height: int, width: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        # the muxer opens it again to move the index
        self._muxer = VideoMuxer(f"/proc/self/fd/{self._file.fileno()}", fps=fps)
        self.facts: Facts = {"height": height, "width": width, "fps": fps, "frames": 0}

    def add(self, frames: np.ndarray[Any, Any]) -> bytes:
        """Encode frames. Nothing can be sent yet."""
        self.facts["frames"] += len(frames)
        self._muxer.add(frames)
        return b""

    def pieces(self) -> Iterator[bytes]:
        """Finish the file and yield its bytes."""
        self._muxer.close()
        self._file.seek(0)
        while data := self._file.read(_PIECE):
            yield data
        self._file.close()

    def close(self) -> None:
        if not self._file.closed:
            self._muxer.discard()
            self._file.close()


class _Fragmented:
    """A video file that is sent while it is made."""

    def __init__(self, fps: float, height: int, width: int, multiple: int) -> None:
        """`multiple`: as for `VideoFragments`."""
        self._fragments = VideoFragments(fps=fps, multiple=multiple)
        self.facts: Facts = {"height": height, "width": width, "fps": fps, "frames": 0}

    def add(self, frames: np.ndarray[Any, Any]) -> bytes:
        self.facts["frames"] += len(frames)
        return self._fragments.add(frames)

    def pieces(self) -> Iterator[bytes]:
        """Finish the file: nothing is left."""
        self._fragments.close()
        yield b""

    def close(self) -> None:
        self._fragments.close()


@dataclass(slots=True)
class FileSet:
    """The files of one request."""

    formats: Mapping[str, Format]
    _have: dict[Key, int] = field(default_factory=dict)
    """Units that have arrived."""
    _sent: dict[Key, int] = field(default_factory=dict)
    """Units of `EncodedDelta` that have been made."""
    _rest: dict[Key, bytes] = field(default_factory=dict)
    """Bytes of a file that wait for others, to be written in base64 together."""
    _audio: dict[Key, _Audio] = field(default_factory=dict)
    _videos: dict[Key, _Video | _Fragmented] = field(default_factory=dict)

    def fresh(self, stage: str, part: Part) -> Part:
        """Return a part without the units that an earlier attempt of its stage has given."""
        key = (stage, part["kind"], part["output"])
        start, data, have = part["start"], part["data"], self._have.get(key, 0)
        self._have[key] = max(have, start + len(data))
        skip = max(0, have - start)
        return {**part, "start": start + skip, "data": data[skip:]}

    @staticmethod
    def split(part: Part) -> list[Part]:
        """Split a part into parts that are encoded in moments."""
        if part["kind"] != "video":
            return [part]
        starts = range(0, max(1, len(part["data"])), FRAMES)
        return [{**part, "start": part["start"] + at, "data": part["data"][at : at + FRAMES]} for at in starts]

    def feed(self, stage: str, part: Part) -> list[EncodedDelta]:
        """Encode a fresh part; return what is ready."""
        key = (stage, part["kind"], part["output"])
        data = np.asarray(part["data"])
        if not len(data):
            return []
        if part["kind"] == "audio":
            return self._samples(key, data, part["sample_rate"])
        if part["kind"] == "video":
            return self._frames(key, data, part["fps"])
        return self._images(key, data, part)

    def finish(self, stages: Sequence[str]) -> list[EncodedDelta]:
        """Return the rest of all files. `stages`: those whose outputs have ended."""
        audio = self.formats.get("audio")
        if audio is not None and audio.whole and not self._audio:
            self._begin((min(stages), "audio", 0), SILENCE_RATE)
        rest = [self._delta(key, one.file.finish(), one.facts, last=True) for key, one in self._audio.items()]
        for key, video in self._videos.items():
            *most, last = video.pieces()
            rest += [self._delta(key, data, video.facts) for data in most]
            rest.append(self._delta(key, last, video.facts, last=True))
        return rest

    def close(self) -> None:
        """Delete what is unfinished."""
        for video in self._videos.values():
            video.close()

    def _begin(self, key: Key, sample_rate: int) -> _Audio:
        self._audio[key] = begun = _Audio(AudioFile(self.formats["audio"], sample_rate), sample_rate)
        return begun

    def _samples(self, key: Key, samples: np.ndarray[Any, Any], sample_rate: int) -> list[EncodedDelta]:
        audio = self._audio.get(key) or self._begin(key, sample_rate)
        audio.seconds += len(samples) / sample_rate
        made = self._delta(key, audio.file.feed(samples), audio.facts)
        return [made] if made.data else []

    def _frames(self, key: Key, frames: np.ndarray[Any, Any], fps: float) -> list[EncodedDelta]:
        height, width = frames.shape[1:3]
        form = self.formats["video"]
        made = []
        if key not in self._videos:
            if form.poster:
                facts: Facts = {"height": height, "width": width}
                poster = (key[0], POSTER, key[2])
                made.append(self._delta(poster, encode_thumbnail(frames[0]), facts, last=True))
            if form.fragmented:  # of whole pieces of base64, which hold back no byte of a frame
                self._videos[key] = _Fragmented(fps, height, width, BASE64_BYTES if form.base64 else 1)
            else:
                self._videos[key] = _Video(fps, height, width)
        video = self._videos[key]
        if data := video.add(frames):
            made.append(self._delta(key, data, video.facts))
        return made

    def _images(self, key: Key, images: np.ndarray[Any, Any], part: Part) -> list[EncodedDelta]:
        form = self.formats["image"]
        height, width = images.shape[1:3]
        facts: Facts = {"height": height, "width": width, "tokens": part["tokens"]}
        made = []
        for number, image in enumerate(images, part["start"]):
            data = encode_image(image.tobytes(), height, width, form.name, form.quality)
            own = {"partial": number} if key[1] == PREVIEW else {}
            made.append(self._delta(key, data, {**facts, **own}, last=True))
        return made

    def _delta(self, key: Key, data: bytes, facts: Facts, *, last: bool = False) -> EncodedDelta:
        mime = FORMATS["image"]["webp"]
        if key[1] != POSTER:
            kind = "image" if key[1] == PREVIEW else key[1]
            form = self.formats[kind]
            data = self._base64(key, data, last=last) if form.base64 else data
            mime = FORMATS[kind][form.name]
        made = EncodedDelta(*key, self._sent.get(key, 0), mime, data, last=last, facts=dict(facts))
        self._sent[key] = made.end
        return made

    def _base64(self, key: Key, data: bytes, *, last: bool) -> bytes:
        data = self._rest.pop(key, b"") + data
        whole = len(data) if last else len(data) - len(data) % BASE64_BYTES
        self._rest[key] = data[whole:]
        return base64.b64encode(data[:whole])
