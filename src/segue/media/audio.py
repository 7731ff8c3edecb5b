"""Decode audio: any file that FFmpeg reads, or raw samples, to float32 mono at a given rate."""

from __future__ import annotations

from typing import Any

import av
import av.container
import numpy as np

from segue.media.decode import container, frames_of, raw_array, refuse
from segue.media.limits import MediaLimits, over
from segue.messages.request import ArrayInfo, MediaPart

DEFAULT_RATE = 16000
"""Samples per second of a raw array without a rate."""
_LOWEST_RATE, _HIGHEST_RATE = 1000, 768_000
# rates of real recordings; a rate far outside turns a few bytes into hours of samples, or costs the resampler minutes

Samples = np.ndarray[Any, np.dtype[np.float32]]


def decode_audio(part: MediaPart, rate: int, limits: MediaLimits) -> Samples:
    """A part of kind `audio` (or the first audio track of a video file) → [samples] float32 mono at `rate` per second.

    libswresample mixes channels down and converts rates. Raises `InvalidRequest` for a file without audio, `TooLarge`
    over `max_bytes` or `max_audio_seconds`.
    """
    limits.check_bytes(part)
    if part.array is not None:
        return _from_array(part, part.array, rate, limits)
    with container(part, limits) as opened:
        if not opened.streams.audio:
            raise refuse(part, "the file has no audio track; send e.g. WAV, MP3, FLAC, Ogg or M4A")
        return read_track(part, opened, rate, limits)


def read_track(part: MediaPart, opened: av.container.InputContainer, rate: int, limits: MediaLimits) -> Samples:
    """Return all samples of the first audio track of an opened file, in the form of `decode_audio`."""
    chunks: list[Samples] = []
    seconds = 0.0
    resampler, form = None, None
    for frame in frames_of(part, opened, opened.streams.audio[0], limits):
        _check_rate(part, frame.sample_rate)
        seconds += frame.samples / frame.sample_rate  # checked before resampling, whose cost grows with its output
        _check_seconds(part, seconds, limits)
        if form != (form := (frame.sample_rate, frame.layout.name, frame.format.name)):  # may change within a track
            chunks += _resampled(resampler, None)
            resampler = _resampler(rate)
        chunks += _resampled(resampler, frame)
    chunks += _resampled(resampler, None)
    if not any(chunk.size for chunk in chunks):
        raise refuse(part, "the audio track holds no samples; the file is empty or cut off")
    return _finite(part, np.concatenate(chunks))


def _resampler(rate: int) -> av.AudioResampler:
    return av.AudioResampler(format="flt", layout="mono", rate=rate)


def _resampled(resampler: av.AudioResampler | None, frame: av.AudioFrame | None) -> list[Samples]:
    """Return the resampled pieces of a frame; without a frame, the rest that the resampler still holds."""
    return [] if resampler is None else [piece.to_ndarray()[0] for piece in resampler.resample(frame)]


def _from_array(part: MediaPart, info: ArrayInfo, rate: int, limits: MediaLimits) -> Samples:
    array = raw_array(part, info)
    if array.ndim != 1 or array.dtype not in (np.float16, np.float32, np.float64, np.int16):
        raise refuse(part, f"audio of {array.dtype} {array.shape}; it must be float32 (samples,), mono in [-1, 1]")
    if not array.size:
        raise refuse(part, "the audio is empty; send at least one sample")
    own_rate = DEFAULT_RATE if info.rate is None else info.rate
    _check_rate(part, own_rate)
    _check_seconds(part, array.size / own_rate, limits)
    samples = array / np.float32(32768) if array.dtype == np.int16 else array
    samples = _finite(part, samples.astype(np.float32))
    return samples if own_rate == rate else resample(samples, int(own_rate), rate)


def resample(samples: Samples, own_rate: int, rate: int) -> Samples:
    """float32 [samples] at `own_rate` → at `rate`, samples per second."""
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="flt", layout="mono")
    frame.sample_rate = own_rate
    resampler = _resampler(rate)
    chunks = [*_resampled(resampler, frame), *_resampled(resampler, None)]
    return np.concatenate(chunks or [samples[:0]])


def _check_rate(part: MediaPart, rate: float) -> None:
    if not (_LOWEST_RATE <= rate <= _HIGHEST_RATE and rate == int(rate)):
        right = f"a whole number of samples per second from {_LOWEST_RATE} to {_HIGHEST_RATE}"
        raise refuse(part, f"the audio's rate is {rate!r}; it must be {right}")


def _check_seconds(part: MediaPart, seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.max_audio_seconds:
        raise over(part, "max_audio_seconds", "too many seconds of audio", limits.max_audio_seconds)


def _finite(part: MediaPart, samples: Samples) -> Samples:
    if not np.isfinite(samples).all():
        raise refuse(part, "the audio has samples that are not numbers (NaN or infinite)")
    return samples
