"""What decoding images, audio and video has in common: raw arrays, containers, and the errors of both."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.container
import numpy as np

from segue.media.limits import where
from segue.messages.errors import InvalidRequest
from segue.messages.request import ArrayInfo, MediaPart

# Demuxers of media files. Left out on purpose: playlists and scripts (hls, concat, dash, …), which name other files and
# addresses for the demuxer to open.
_CONTAINERS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,asf,au,avi,caf,eac3,flac,flv,gif,h264,hevc,ivf,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,"
    "mp3,mpeg,mpegts,mpegvideo,ogg,opus,voc,w64,wav,wv,yuv4mpegpipe"
)
_OPEN_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}


def refuse(part: MediaPart, why: str) -> InvalidRequest:
    """The error of a part that cannot be read; `why` says what it is and what would be right."""
    return InvalidRequest(f"{where(part)}: {why}", field=part.field or None)


def raw_array(part: MediaPart, info: ArrayInfo) -> np.ndarray[Any, Any]:
    """The array a part carries, read-only, in its own dtype and shape."""
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


@contextmanager
def container(part: MediaPart) -> Iterator[av.container.InputContainer]:
    """The opened file of a part. What FFmpeg cannot read, in opening or later, raises `InvalidRequest`."""
    if not part.data:
        raise refuse(part, f"the {part.kind} is empty; send the bytes of a file")
    try:
        with av.open(io.BytesIO(part.data), options=_OPEN_OPTIONS, metadata_errors="ignore") as opened:
            yield opened
    except av.FFmpegError as error:
        raise refuse(part, f"not a readable {part.kind} file ({error.strerror}); {_RIGHT[part.kind]}") from error


_RIGHT = {
    "image": "send e.g. JPEG, PNG or WebP",
    "audio": "send e.g. WAV, MP3, FLAC, Ogg or M4A",
    "video": "send e.g. MP4, WebM or Matroska",
}
