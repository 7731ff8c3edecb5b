"""Encode audio (wav, mp3, flac, opus, aac, raw PCM), whole or as a stream, and images (PNG, WebP, JPEG), in memory."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import av
import numpy as np
from PIL import Image

from segue.messages.errors import InvalidRequest, TooLarge, nearest

IMAGE_FORMATS: dict[str, str] = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}
"""Format name (OpenAI's) → media type."""
_LONGEST = {"webp": 16_383, "jpeg": 65_500}
"""Most pixels of a side: WebP stores 14 bits; the other is libjpeg's limit."""


def check_image_format(name: str, field: str) -> str:
    """Return the name itself, or raise `InvalidRequest` naming field and nearest neighbour."""
    if name not in IMAGE_FORMATS:
        raise InvalidRequest(f"{field} is {name!r}, no known image format{nearest(name, IMAGE_FORMATS)}", field=field)
    return name


def check_image_sides(height: int, width: int, name: str, field: str) -> None:
    """Raise `TooLarge` if a file of format `name` cannot hold an image of this size."""
    most = _LONGEST.get(name)
    if most is not None and max(height, width) > most:
        raise TooLarge(
            f"{field} is {name!r}, and the image is {width} x {height} pixels; a side of such a file has at most "
            f"{most}: use png, or ask for a smaller size",
            field=field,
        )


def encode_image(data: bytes, height: int, width: int, name: str, quality: int = 100) -> bytes:
    """Encode raw uint8 RGB, row by row, as a file of format `name` (a key of `IMAGE_FORMATS`).

    `quality`: 0 to 100, for WebP and JPEG; a PNG is always exact. Raises `TooLarge` as `check_image_sides` does.
    """
    check_image_sides(height, width, name, "output_format")
    if len(data) != 3 * height * width:
        raise ValueError(f"a {height}×{width} RGB image has {3 * height * width} bytes, not {len(data)}")
    # PNG at level 1: three times faster than the default for a few percent of size
    settings = {"compress_level": 1} if name == "png" else {"quality": quality}
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), data).save(file, format=name.upper(), **settings)
    return file.getvalue()


def encode_thumbnail(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Encode [height, width, 3] uint8 RGB as WebP, scaled down only if it exceeds WebP's size limit."""
    image = Image.fromarray(pixels)
    image.thumbnail((_LONGEST["webp"], _LONGEST["webp"]))
    return encode_image(image.tobytes(), image.height, image.width, "webp", 90)


Samples = np.ndarray[Any, np.dtype[np.float32]]
"""[samples] float32 mono in [-1, 1]; values outside are clipped."""

_UNKNOWN_LENGTH = 0xFFFFFFFF
"""Length fields of a WAV whose length is unknown when its header is sent (players then read to the end)."""
_PCM_PIECE = 1 << 20
"""Samples passed to a codec at once: bounds the size of intermediate copies."""


@dataclass(frozen=True)
class _Codec:
    """PyAV's settings for one format."""

    muxer: str
    encoder: str
    sample_format: str
    rates: tuple[int, ...]
    """Rates that the encoder takes; samples at another rate are resampled to the next higher one."""
    bit_rate: int | None
    stream_options: dict[str, str]
    """Muxer options when the output cannot be rewound."""
    extra: dict[str, str]


_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_CODECS = {
    # a Xing header needs the file's length; without one, only an ID3 tag would precede the audio
    "mp3": _Codec("mp3", "libmp3lame", "fltp", _MPEG_RATES, 96_000, {"write_xing": "0", "id3v2_version": "0"}, {}),
    "flac": _Codec("flac", "flac", "s16", (*_MPEG_RATES, 96000), None, {}, {}),
    # one page per 100 ms: ffmpeg's default of a second would delay the audio
    "opus": _Codec(
        "ogg", "libopus", "flt", (8000, 12000, 16000, 24000, 48000), 64_000, {"page_duration": "100000"}, {}
    ),
    "aac": _Codec("adts", "aac", "fltp", _MPEG_RATES, 96_000, {}, {}),
}

AUDIO_FORMATS: dict[str, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}
"""Format name (OpenAI's) → media type. `pcm16`: little-endian 16-bit mono without a header."""


def check_audio_format(name: str, field: str) -> str:
    """Return the name itself, or raise `InvalidRequest` naming field and nearest neighbour."""
    if name not in AUDIO_FORMATS:
        raise InvalidRequest(f"{field} is {name!r}, no known audio format{nearest(name, AUDIO_FORMATS)}", field=field)
    return name


def pcm16(samples: Samples) -> bytes:
    """Convert float32 in [-1, 1] to little-endian int16, rounded to nearest; 1.0 becomes 32767, NaN becomes 0."""
    finite = np.nan_to_num(np.asarray(samples, dtype=np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.rint(np.clip(finite, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def wav_header(sample_rate: int, samples: int | None) -> bytes:
    """Return the 44-byte header of 16-bit mono PCM (RIFF, WAVE_FORMAT_PCM). `samples` None: length unknown."""
    data_bytes = _UNKNOWN_LENGTH if samples is None else 2 * samples
    riff_bytes = min(data_bytes + 36, _UNKNOWN_LENGTH)
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF", riff_bytes, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16, b"data", data_bytes,
    )  # fmt: skip


class AudioEncoder(Protocol):
    """Encodes a stream of samples; the outputs of `feed` and `finish`, concatenated, are the file."""

    def feed(self, samples: Samples) -> bytes:
        """Encode samples and return the bytes that are ready; none while a codec fills its frame."""
        ...

    def finish(self) -> bytes:
        """Return the remaining bytes. The encoder cannot be used again."""
        ...


class _PcmEncoder:
    """Encodes raw PCM, or WAV: a header of unknown length precedes the first samples."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def feed(self, samples: Samples) -> bytes:
        header, self._header = self._header, b""
        return header + pcm16(samples)

    def finish(self) -> bytes:
        return self.feed(np.empty(0, np.float32))


class _Sink:
    """A write-only file for PyAV: without `seek`, the muxer knows that it cannot rewind."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self._pieces.append(bytes(piece))
        return len(piece)

    def take(self) -> bytes:
        taken, self._pieces = b"".join(self._pieces), []
        return taken


class _CodecEncoder:
    """One PyAV encoder writing into `file`."""

    def __init__(self, codec: _Codec, sample_rate: int, file: _Sink | io.BytesIO, options: dict[str, str]) -> None:
        self._rate = sample_rate
        self._at = 0
        rate = next((known for known in codec.rates if known >= sample_rate), codec.rates[-1])
        self._container = av.open(file, "w", format=codec.muxer, options=options)
        self._stream = self._container.add_stream(codec.encoder, rate=rate, layout="mono")
        if codec.bit_rate is not None:
            self._stream.bit_rate = codec.bit_rate
        self._resampler = av.AudioResampler(format=codec.sample_format, layout="mono", rate=rate)

    def write(self, samples: Samples) -> None:
        # every codec gets 16-bit samples, so that flac holds exactly the samples of wav
        words = np.frombuffer(pcm16(samples), dtype="<i2")
        for start in range(0, words.size, _PCM_PIECE):
            piece = words[start : start + _PCM_PIECE]
            frame = av.AudioFrame.from_ndarray(piece[None], format="s16", layout="mono")
            frame.sample_rate = self._rate
            frame.pts = self._at
            self._at += piece.size
            self._mux(frame)

    def close(self) -> None:
        if self._at:
            self._mux(None)
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        self._container.close()

    def _mux(self, frame: av.AudioFrame | None) -> None:
        for resampled in self._resampler.resample(frame):
            for packet in self._stream.encode(resampled):
                self._container.mux(packet)


class _CodecStream:
    """Encodes with a codec and returns its output as it is produced."""

    def __init__(self, codec: _Codec, sample_rate: int) -> None:
        self._sink = _Sink()
        self._encoder = _CodecEncoder(codec, sample_rate, self._sink, {**codec.stream_options, "flush_packets": "1"})

    def feed(self, samples: Samples) -> bytes:
        self._encoder.write(samples)
        return self._sink.take()

    def finish(self) -> bytes:
        self._encoder.close()
        return self._sink.take()


def audio_encoder(name: str, sample_rate: int) -> AudioEncoder:
    """Return a streaming encoder of mono samples at `sample_rate` Hz to format `name` (a key of `AUDIO_FORMATS`)."""
    check_audio_format(name, "audio.format")
    if name == "pcm16":
        return _PcmEncoder(b"")
    if name == "wav":
        return _PcmEncoder(wav_header(sample_rate, None))
    return _CodecStream(_CODECS[name], sample_rate)


def encode_audio(samples: Samples, sample_rate: int, name: str) -> bytes:
    """Encode a whole file: its header has the length, and the encoder delay if the format can hold it (mp3, opus)."""
    check_audio_format(name, "audio.format")
    if name == "pcm16":
        return pcm16(samples)
    if name == "wav":
        return wav_header(sample_rate, len(samples)) + pcm16(samples)
    file = io.BytesIO()
    encoder = _CodecEncoder(_CODECS[name], sample_rate, file, {})
    encoder.write(samples)
    encoder.close()
    return file.getvalue()


def encode_png(data: bytes, height: int, width: int) -> bytes:
    """Encode raw uint8 RGB, row by row, as a PNG file."""
    if len(data) != 3 * height * width:
        raise ValueError(f"a {height}×{width} RGB image has {3 * height * width} bytes, not {len(data)}")
    file = io.BytesIO()
    # level 1: three times faster than the default for a few percent of size
    Image.frombytes("RGB", (width, height), data).save(file, format="PNG", compress_level=1)
    return file.getvalue()
