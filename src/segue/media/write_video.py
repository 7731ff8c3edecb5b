"""Write frames, and audio if there is any, to an MP4 file (H.264 and AAC) as they arrive."""

from __future__ import annotations

import contextlib
import os
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream

from segue.messages.errors import ConfigError
from segue.messages.formats import check_video_sides

Frames = np.ndarray[Any, np.dtype[np.uint8]]
"""[frames, height, width, 3] RGB."""
_QUALITY = "18"
"""x264's constant rate factor: visually close to lossless for most viewers."""
_ENCODER = "libx264"


def check_video_encoder(name: str = _ENCODER) -> None:
    """Raise `ConfigError` if PyAV's FFmpeg lacks the encoder."""
    try:
        av.Codec(name, "w")
    except av.codec.codec.UnknownCodecError as error:
        raise ConfigError(
            f"cannot write videos: PyAV's FFmpeg has no encoder {name!r}; PyAV's own wheels have it "
            "(pip install --force-reinstall av)",
            field="model",
        ) from error


class VideoMuxer:
    """Encodes into a file that is there. The bytes do not depend on how the frames are split.

    Raises `OSError` if it cannot write, and `TooLarge` like `check_video_sides`.
    """

    def __init__(self, path: str, *, fps: float, sample_rate: int | None = None) -> None:
        """`sample_rate`: of the audio, if there will be any; it may come before, between or after the frames."""
        self._fps = Fraction(fps).limit_denominator(1001)
        self._rate = sample_rate
        # with the index at the start, players begin before they have the whole file
        self._container = av.open(path, "w", format="mp4", options={"movflags": "+faststart"})
        self._video: VideoStream | None = None
        self._audio: AudioStream | None = None
        self._samples = 0
        if sample_rate is not None:
            self._audio = self._container.add_stream("aac", rate=sample_rate, layout="mono")

    def add(self, frames: Frames) -> None:
        """The next frames, all of one size: [frames, height, width, 3] uint8."""
        check_frames(frames)
        for pixels in frames:
            if self._video is None:
                self._video = video_stream(self._container, self._fps, pixels)
            self._container.mux(self._video.encode(as_yuv(pixels, self._video)))

    def add_audio(self, samples: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """The next samples: [samples] float32 mono in [-1, 1]."""
        if self._audio is None or self._rate is None:
            raise ValueError("the file was opened without a sample_rate, so it has no audio track")
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples, dtype=np.float32)[None], format="fltp", layout="mono"
        )
        frame.rate, frame.pts, frame.time_base = self._rate, self._samples, Fraction(1, self._rate)
        self._samples += len(samples)
        self._container.mux(self._audio.encode(frame))

    def close(self) -> None:
        """Finish the file."""
        if self._video is None:
            raise ValueError("a video has at least one frame")
        for stream in (self._video, self._audio):
            if stream is not None:
                self._container.mux(stream.encode(None))
        self._container.close()

    def discard(self) -> None:
        """Close the unfinished file."""
        with contextlib.suppress(OSError):  # an earlier write error occurs again on closing
            self._container.close()


def check_frames(frames: Frames) -> None:
    """Raise `ValueError` for an array that holds no frames."""
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"frames are {frames.dtype} {frames.shape}; they must be uint8 [frames, height, width, 3]")


def video_stream(
    container: OutputContainer, fps: Fraction, pixels: np.ndarray[Any, Any], **options: str
) -> VideoStream:
    """A new H.264 stream for frames like this one, [height, width, 3]. `options`: further ones of x264. Raises
    `TooLarge`."""
    height, width = _even_sides(pixels)
    check_video_sides(height, width, "size")
    stream = cast(VideoStream, container.add_stream(_ENCODER, rate=fps, options={"crf": _QUALITY, **options}))
    stream.height, stream.width = height, width
    stream.pix_fmt = "yuv420p"
    stream.codec_context.colorspace = Colorspace.ITU709
    stream.codec_context.color_range = ColorRange.MPEG
    stream.codec_context.color_primaries = ColorPrimaries.BT709
    stream.codec_context.color_trc = ColorTrc.BT709
    return stream


def as_yuv(pixels: np.ndarray[Any, Any], stream: VideoStream) -> av.VideoFrame:
    """A frame [height, width, 3] uint8 as the stream's encoder takes it. Raises `ValueError` for another size than the
    stream's."""
    height, width = _even_sides(pixels)
    if (height, width) != (stream.height, stream.width):
        raise ValueError(f"a frame is {height} x {width}; earlier frames are {stream.height} x {stream.width}")
    frame = av.VideoFrame.from_ndarray(_even(pixels), format="rgb24")
    return frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)


class VideoWriter:
    """Writes one file. It gets its name only when complete: until then it is `.NAME.PID.part`, which an error deletes.

        with VideoWriter(path, fps=16) as video:
            video.add(frames)   # any number of times

    Raises `OSError` if it cannot write (a full disk, no such directory), and `TooLarge` like `check_video_sides`.
    """

    def __init__(self, path: str | os.PathLike[str], *, fps: float, sample_rate: int | None = None) -> None:
        """As `VideoMuxer`."""
        self._path = Path(path)
        # not `NAME.part`: one of the user's downloads may have that name
        self._part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        self._part.write_bytes(b"")  # the container opens it only with the first frame; errors shall show here
        self._muxer = VideoMuxer(str(self._part), fps=fps, sample_rate=sample_rate)

    def add(self, frames: Frames) -> None:
        """The next frames, all of one size: [frames, height, width, 3] uint8."""
        self._muxer.add(frames)

    def add_audio(self, samples: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """The next samples: [samples] float32 mono in [-1, 1]."""
        self._muxer.add_audio(samples)

    def close(self) -> None:
        """Finish the file and give it its name."""
        try:
            self._muxer.close()
            self._part.replace(self._path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete the unfinished file."""
        self._muxer.discard()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _even_sides(pixels: np.ndarray[Any, Any]) -> tuple[int, int]:
    height, width = pixels.shape[:2]
    return height + height % 2, width + width % 2


def _even(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Make sides even, as H.264 needs for chroma at half resolution: repeat the last row or column of an odd side."""
    height, width, _ = pixels.shape
    if height % 2 or width % 2:
        pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(pixels)
