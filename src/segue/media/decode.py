"""Shared parts of decoding images, audio and video: raw arrays, containers, and their errors."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.container
import numpy as np

from segue.media.limits import MediaLimits, over, where
from segue.messages.errors import InvalidRequest
from segue.messages.request import ArrayInfo, MediaPart

# Demuxers of media files. Left out on purpose: playlists and scripts (hls, concat, dash, …), because they make the
# demuxer open other files and addresses.
_CONTAINERS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,asf,au,avi,caf,eac3,flac,flv,gif,h264,hevc,ivf,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,"
    "mp3,mpeg,mpegts,mpegvideo,ogg,opus,voc,w64,wav,wv,yuv4mpegpipe"
)


def refuse(part: MediaPart, why: str) -> InvalidRequest:
    """Return the error for a part that cannot be read; `why` gives the value and the remedy."""
    return InvalidRequest(f"{where(part)}: {why}", field=part.field or None)


def raw_array(part: MediaPart, info: ArrayInfo) -> np.ndarray[Any, Any]:
    """Return a part's array, read-only, in its own dtype and shape."""
    try:
        dtype = np.dtype(info.dtype)
    except TypeError as error:
        raise refuse(part, f"dtype {info.dtype!r} is not known; use e.g. uint8 or float32") from error
    if dtype.kind not in "uif":
        raise refuse(part, f"dtype {info.dtype!r} holds no samples; use e.g. uint8 or float32")
    if any(size < 0 for size in info.shape):
        raise refuse(part, f"shape {info.shape} has a negative size")
    wanted = math.prod(info.shape) * dtype.itemsize
    if wanted != len(part.data):
        raise refuse(part, f"shape {info.shape} of {dtype} needs {wanted} bytes, but {len(part.data)} came")
    return np.frombuffer(part.data, dtype).reshape(info.shape)


def check_frame(part: MediaPart, width: int, height: int, limits: MediaLimits) -> None:
    """Raise `TooLarge` for frames of more than `max_image_pixels`."""
    if width * height > limits.max_image_pixels:
        raise over(part, "max_image_pixels", f"frames of {width} × {height} pixels", limits.max_image_pixels)


def frames_of(
    part: MediaPart, opened: av.container.InputContainer, stream: av.VideoStream | av.AudioStream, limits: MediaLimits
) -> Iterator[Any]:
    """Yield the decoded frames of a stream, within the budget of `limits`. Packets that yield no frame count too,
    because they take time."""
    for packet in opened.demux(stream):
        limits.budget.decode(part, 0, limits)
        for frame in packet.decode():
            if isinstance(frame, av.VideoFrame):
                limits.budget.decode(part, frame.width * frame.height, limits)
            yield frame


@contextmanager
def container(part: MediaPart, limits: MediaLimits) -> Iterator[av.container.InputContainer]:
    """Open the file of a part. It raises `InvalidRequest` if FFmpeg cannot read the file, on opening or later.

    No decoder makes a frame of more than `max_image_pixels`, not even to probe the file.
    """
    if not part.data:
        raise refuse(part, f"the {part.kind} is empty; send the bytes of a file")
    if part.data[:4] == b"GIF8" and len(part.data) >= 10:  # FFmpeg decodes it to probe it
        width, height = struct.unpack_from("<HH", part.data, 6)
        check_frame(part, width, height, limits)
    bound = {"max_pixels": str(limits.max_image_pixels)}
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none", **bound}
    try:
        with av.open(io.BytesIO(part.data), options=options, metadata_errors="ignore") as opened:
            for stream in opened.streams.video:
                if stream.codec_context is not None:  # None for an unknown codec
                    stream.codec_context.options = bound
            yield opened
    except av.FFmpegError as error:
        raise refuse(part, f"not a readable {part.kind} file ({error.strerror}); {_RIGHT[part.kind]}") from error


_RIGHT = {
    "image": "send e.g. JPEG, PNG or WebP",
    "audio": "send e.g. WAV, MP3, FLAC, Ogg or M4A",
    "video": "send e.g. MP4, WebM or Matroska",
}
