"""Sound in: any file FFmpeg reads, or raw samples, to float32 mono at the wanted rate."""

from __future__ import annotations

from typing import Any

import av
import av.container
import numpy as np

from segue.media.decode import container, raw_array, refuse
from segue.media.limits import MediaLimits, over
from segue.messages.request import ArrayInfo, MediaPart

DEFAULT_RATE = 16000
"""Samples per second of a raw array that does not say."""
_HIGHEST_RATE = 768_000

Samples = np.ndarray[Any, np.dtype[np.float32]]


def decode_audio(part: MediaPart, rate: int, limits: MediaLimits) -> Samples:
    """A part of kind `audio` (or the first audio track of a video file) → [samples] float32 mono at `rate` per second.

    Channels are mixed down and rates converted by libswresample. Raises `InvalidRequest` for what holds no sound,
    `TooLarge` over `max_bytes` or `max_audio_seconds`.
    """
    limits.check_bytes(part)
    if part.array is not None:
        return _from_array(part, part.array, rate, limits)
    with container(part) as opened:
        if not opened.streams.audio:
            raise refuse(part, "the file has no audio track; send e.g. WAV, MP3, FLAC, Ogg or M4A")
        return read_track(part, opened, rate, limits)


def read_track(part: MediaPart, opened: av.container.InputContainer, rate: int, limits: MediaLimits) -> Samples:
    """All samples of the first audio track of an opened file."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    chunks: list[Samples] = []
    samples = 0
    for frame in opened.decode(opened.streams.audio[0]):
        for resampled in resampler.resample(frame):
            chunks.append(resampled.to_ndarray()[0])
            samples += resampled.samples
        _check_seconds(part, samples / rate, limits)
    if samples:
        chunks += [last.to_ndarray()[0] for last in resampler.resample(None)]
    if not any(chunk.size for chunk in chunks):
        raise refuse(part, "the audio track holds no samples; the file is empty or cut off")
    return _finite(part, np.concatenate(chunks))


def _from_array(part: MediaPart, info: ArrayInfo, rate: int, limits: MediaLimits) -> Samples:
    array = raw_array(part, info)
    if array.ndim != 1 or array.dtype not in (np.float16, np.float32, np.float64, np.int16):
        raise refuse(part, f"audio of {array.dtype} {array.shape}; it must be float32 (samples,), mono in [-1, 1]")
    if not array.size:
        raise refuse(part, "the audio is empty; send at least one sample")
    own_rate = DEFAULT_RATE if info.rate is None else info.rate
    if not (1 <= own_rate <= _HIGHEST_RATE and own_rate == int(own_rate)):
        right = f"it must be a whole number of samples per second, at most {_HIGHEST_RATE}"
        raise refuse(part, f"the audio's rate is {own_rate!r}; {right}")
    _check_seconds(part, array.size / own_rate, limits)
    samples = array / np.float32(32768) if array.dtype == np.int16 else array
    samples = _finite(part, samples.astype(np.float32))
    return samples if own_rate == rate else _resample(samples, int(own_rate), rate)


def _resample(samples: Samples, own_rate: int, rate: int) -> Samples:
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="flt", layout="mono")
    frame.sample_rate = own_rate
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([piece.to_ndarray()[0] for piece in frames] or [samples[:0]])


def _check_seconds(part: MediaPart, seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.max_audio_seconds:
        raise over(part, "max_audio_seconds", "too many seconds of audio", limits.max_audio_seconds)


def _finite(part: MediaPart, samples: Samples) -> Samples:
    if not np.isfinite(samples).all():
        raise refuse(part, "the audio has samples that are not numbers (NaN or infinite)")
    return samples
