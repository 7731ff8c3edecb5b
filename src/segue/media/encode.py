"""Encode audio (wav, mp3, flac, opus, aac, raw PCM), whole or as a stream, and images (PNG, WebP, JPEG), in memory."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import av
import numpy as np
from PIL import Image

from segue.messages.formats import LONGEST, check_audio_format, check_image_sides


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
    image.thumbnail((LONGEST["webp"], LONGEST["webp"]))
    return encode_image(image.tobytes(), image.height, image.width, "webp", 90)


Samples = np.ndarray[Any, np.dtype[np.float32]]
"""[samples] float32 mono in [-1, 1]; values outside are clipped."""

_UNKNOWN_LENGTH = 0xFFFFFFFF
"""Length fields of a WAV whose length is unknown when its header is sent (players then read to the end)."""
_BLOCK = 480
"""Samples passed to a codec or filter at once: what FFmpeg's resamplers give depends, in the last bit, on how samples
are split."""


class Blocks:
    """Splits a stream of samples into blocks of `_BLOCK`, the last of which may be shorter."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.float32)

    def feed(self, samples: Samples) -> Iterator[Samples]:
        """Return the blocks that are full."""
        samples = np.concatenate([self._held, np.asarray(samples, np.float32)])
        full = len(samples) - len(samples) % _BLOCK
        self._held = samples[full:]
        return (samples[start : start + _BLOCK] for start in range(0, full, _BLOCK))

    def rest(self) -> Samples:
        """Return the last block, perhaps empty."""
        held, self._held = self._held, np.empty(0, np.float32)
        return held


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


_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_CODECS = {
    # a Xing header needs the file's length; without one, only an ID3 tag would precede the audio
    "mp3": _Codec("mp3", "libmp3lame", "fltp", _MPEG_RATES, 96_000, {"write_xing": "0", "id3v2_version": "0"}),
    "flac": _Codec("flac", "flac", "s16", (*_MPEG_RATES, 96000), None, {}),
    # one page per 100 ms: ffmpeg's default of a second would delay the audio
    "opus": _Codec("ogg", "libopus", "flt", (8000, 12000, 16000, 24000, 48000), 64_000, {"page_duration": "100000"}),
    "aac": _Codec("adts", "aac", "fltp", _MPEG_RATES, 96_000, {}),
}


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
        self._blocks = Blocks()
        rate = next((known for known in codec.rates if known >= sample_rate), codec.rates[-1])
        # bitexact: without it, the serial number of an Ogg stream is drawn at random
        self._container = av.open(file, "w", format=codec.muxer, options={"fflags": "+bitexact", **options})
        self._stream = self._container.add_stream(codec.encoder, rate=rate, layout="mono")
        if codec.bit_rate is not None:
            self._stream.bit_rate = codec.bit_rate
        self._resampler = av.AudioResampler(format=codec.sample_format, layout="mono", rate=rate)

    def write(self, samples: Samples) -> None:
        for block in self._blocks.feed(samples):
            self._write(block)

    def _write(self, block: Samples) -> None:
        # every codec gets 16-bit samples, so that flac holds exactly the samples of wav
        words = np.frombuffer(pcm16(block), dtype="<i2")
        frame = av.AudioFrame.from_ndarray(words[None], format="s16", layout="mono")
        frame.sample_rate = self._rate
        frame.pts = self._at
        self._at += words.size
        self._mux(frame)

    def close(self) -> None:
        if len(rest := self._blocks.rest()):
            self._write(rest)
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

    def __init__(self, codec: _Codec, sample_rate: int, options: Mapping[str, str]) -> None:
        self._sink = _Sink()
        options = {**codec.stream_options, "flush_packets": "1", **options}
        self._encoder = _CodecEncoder(codec, sample_rate, self._sink, options)

    def feed(self, samples: Samples) -> bytes:
        self._encoder.write(samples)
        return self._sink.take()

    def finish(self) -> bytes:
        self._encoder.close()
        return self._sink.take()


class _Headless:
    """A FLAC stream without what precedes its first frame: "fLaC", and blocks with four bytes of last flag, type and
    length (RFC 9639, section 8)."""

    def __init__(self, stream: AudioEncoder) -> None:
        self._stream = stream
        self._head: bytes | None = b""
        """What has come of the header; None: it is over."""

    def feed(self, samples: Samples) -> bytes:
        return self._frames(self._stream.feed(samples))

    def finish(self) -> bytes:
        return self._frames(self._stream.finish())

    def _frames(self, data: bytes) -> bytes:
        if self._head is None:
            return data
        head = self._head = self._head + data
        at, last = 4, False
        while not last:
            if len(head) < at + 4:
                return b""
            last = bool(head[at] & 0x80)
            at += 4 + int.from_bytes(head[at + 1 : at + 4], "big")
        if len(head) < at:
            return b""
        self._head = None
        return head[at:]


def audio_encoder(name: str, sample_rate: int, *, part: int = 0) -> AudioEncoder:
    """Return a streaming encoder of mono samples at `sample_rate` Hz to format `name` (a key of `AUDIO_FORMATS`). The
    bytes do not depend on how the samples are split.

    `part`: number of earlier files that this one is appended to. What they give together is one file: raw PCM, WAV and
    FLAC hold exactly the samples of all; MP3 and AAC have the codec's padding, at most a tenth of a second, between
    two; Opus is a chained Ogg stream (RFC 3533, section 4).
    """
    check_audio_format(name, "audio.format")
    if name == "pcm16":
        return _PcmEncoder(b"")
    if name == "wav":
        return _PcmEncoder(b"" if part else wav_header(sample_rate, None))
    options = {"serial_offset": str(part)} if name == "opus" else {}
    stream = _CodecStream(_CODECS[name], sample_rate, options)
    return _Headless(stream) if name == "flac" and part else stream


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
