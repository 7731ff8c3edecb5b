"""Decode video: any file that FFmpeg reads, or raw frames, to uint8 RGB frames at a given rate, and its audio track."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import av
import av.container
import numpy as np

from segue.media.audio import Samples, read_track
from segue.media.decode import check_frame, container, frames_of, raw_array, refuse
from segue.media.limits import MediaLimits, over
from segue.messages.request import ArrayInfo, MediaPart

Frames = np.ndarray[Any, np.dtype[np.uint8]]
_LATE = 1e-6  # tolerance of timestamps in seconds


@dataclass(frozen=True)
class Video:
    """A decoded video."""

    frames: Frames
    """[n, height, width, 3] uint8 RGB, upright; frame i shows time i / fps."""
    fps: float
    audio: Samples | None = None
    """[samples] float32 mono: the audio track, if requested and present."""


def decode_video(
    part: MediaPart, fps: float, limits: MediaLimits, audio_rate: int | None = None, *, count: int | None = None
) -> Video:
    """Decode a part of kind `video` to frames at `fps` per second, and its audio at `audio_rate` (None: no audio).

    `count`: sample this many frames, evenly spread, instead of at `fps`, if the file states its duration; None: the
    part's own `frames`, if any.

    Frame i is the one shown at time i / fps. Raw frames whose rate is unknown, or not above `fps`, are taken unchanged
    (`Video.fps` is then their own rate, or `fps` if unknown). Raises `InvalidRequest` for data that are not a video,
    `TooLarge` over a limit.
    """
    limits.check_bytes(part)
    count = part.frames if count is None else count
    if part.array is not None:
        return _from_array(part, part.array, fps, limits, count)
    with container(part, limits) as opened:
        if not opened.streams.video:
            raise refuse(part, "the file has no video track; send e.g. MP4, WebM or Matroska")
        seconds = _seconds(opened)
        if count is not None and seconds is not None:
            fps = count / seconds
        frames = _read_frames(part, opened, fps, limits)
        if count is not None and seconds is not None:  # the stated duration may be off by a frame
            frames = frames[np.arange(count).clip(max=len(frames) - 1)]
    audio = None
    if audio_rate is not None:
        with container(part, limits) as opened:
            if opened.streams.audio:
                audio = read_track(part, opened, audio_rate, limits)
    return Video(frames, fps, audio)


def _seconds(opened: av.container.InputContainer) -> float | None:
    """Return the duration that the file states for its video track, in seconds; None if it states none."""
    stream = opened.streams.video[0]
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base) or None
    return opened.duration / av.time_base if opened.duration else None


def _read_frames(part: MediaPart, opened: av.container.InputContainer, fps: float, limits: MediaLimits) -> Frames:
    stream = opened.streams.video[0]
    if stream.codec_context is not None:
        check_frame(part, stream.codec_context.width, stream.codec_context.height, limits)
    sampler = _Sampler(part, fps, limits)
    step = 1.0 / float(stream.average_rate or 25)
    start, shown = 0.0, -step
    for index, frame in enumerate(frames_of(part, opened, stream, limits)):
        at = shown + step if frame.time is None else float(frame.time)
        if index == 0:
            start = at
        shown = max(at, shown)  # timestamps of a broken file may run backwards
        sampler.show(frame, shown - start)
    return sampler.finish(shown - start + step)


class _Sampler:
    """Samples and holds: keeps the frame shown at each time k / fps."""

    def __init__(self, part: MediaPart, fps: float, limits: MediaLimits) -> None:
        self._part, self._fps, self._limits = part, fps, limits
        self._frames: list[Frames] = []
        self._current: av.VideoFrame | None = None
        self._image: Frames | None = None
        """`_current` as an array, once it has been needed."""
        self._shape: tuple[int, int, int] | None = None
        """Width, height and quarter turns of the first frame, as a stream may change them."""

    def show(self, frame: av.VideoFrame, at: float) -> None:
        """Take the frame that is shown from `at` seconds on."""
        if at > self._limits.max_video_seconds:
            raise over(self._part, "max_video_seconds", "too many seconds of video", self._limits.max_video_seconds)
        self._hold(at)
        self._current, self._image = frame, None

    def finish(self, end: float) -> Frames:
        """Return all frames of a video that lasted `end` seconds."""
        if self._current is None:
            raise refuse(self._part, "the video track holds no frames; the file is empty or cut off")
        self._hold(min(end, self._limits.max_video_seconds))
        if not self._frames:
            self._keep()
        return np.stack(self._frames)

    def _hold(self, until: float) -> None:
        while self._current is not None and len(self._frames) / self._fps < until - _LATE:
            self._keep()

    def _keep(self) -> None:
        assert self._current is not None
        if self._shape is None:
            self._shape = (self._current.width, self._current.height, self._current.rotation // 90)
            if min(self._shape[:2]) < 1:
                raise refuse(self._part, "the video's frames have no pixels")
        width, height, turns = self._shape
        count = len(self._frames) + 1
        _check_frames(self._part, count, count * width * height, self._limits)
        self._limits.budget.keep(self._part, width * height, self._limits)
        if self._image is None:
            pixels = self._current.to_ndarray(format="rgb24", width=width, height=height)
            self._image = np.ascontiguousarray(np.rot90(pixels, turns))
        self._frames.append(self._image)


def _from_array(part: MediaPart, info: ArrayInfo, fps: float, limits: MediaLimits, wanted: int | None) -> Video:
    array = raw_array(part, info)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
        raise refuse(part, f"a video of {array.dtype} {array.shape}; it must be uint8 (frames, height, width, 3)")
    if not array.size:
        raise refuse(part, f"the video is empty: its shape is {array.shape}")
    if info.rate is not None and not 0 < info.rate <= 1000:
        raise refuse(part, f"the video's rate is {info.rate!r}; it must be above 0 and at most 1000 frames per second")
    own = fps if info.rate is None else float(info.rate)
    if wanted is not None:
        fps = own * wanted / array.shape[0]
    if array.shape[0] / own > limits.max_video_seconds:
        raise over(part, "max_video_seconds", f"{array.shape[0] / own:.1f} seconds", limits.max_video_seconds)
    if own > fps or wanted is not None:
        count = max(1, int(np.ceil(array.shape[0] / own * fps - _LATE)))
        array = array[(np.arange(count) * own / fps + _LATE).astype(int)]
    pixels = array.shape[0] * array.shape[1] * array.shape[2]
    _check_frames(part, array.shape[0], pixels, limits)
    limits.budget.keep(part, pixels, limits)
    return Video(array.copy(), min(own, fps) if wanted is None else fps)


def _check_frames(part: MediaPart, frames: int, pixels: int, limits: MediaLimits) -> None:
    if frames > limits.max_video_frames:
        raise over(part, "max_video_frames", "too many frames after sampling", limits.max_video_frames)
    if pixels > limits.max_video_pixels:
        raise over(part, "max_video_pixels", "too many pixels in its sampled frames", limits.max_video_pixels)
