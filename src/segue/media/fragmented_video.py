"""Write frames to a fragmented MP4 (H.264) as they arrive: the bytes of a frame are there at once.

Every frame is muxed by itself, since a muxer that goes on writes a frame only when it has the next one."""

from __future__ import annotations

import io
from fractions import Fraction

import av
from av.container import OutputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from segue.media.write_video import Frames, as_yuv, check_frames, video_stream

_OPTIONS = {
    "movflags": "empty_moov+default_base_moof+frag_discont+skip_trailer",
    # without these the muxer shifts every fragment to time 0
    "use_editlist": "0",
    "avoid_negative_ts": "disabled",
}
_BOX = 8
"""Bytes of a box's head: its size, and its type."""


class VideoFragments:
    """Encodes one video. The bytes do not depend on how the frames are split. Raises as `VideoMuxer`."""

    def __init__(self, *, fps: float, multiple: int = 1) -> None:
        """`multiple`: the size of each fragment is one of this; a box without content fills it up."""
        self._multiple = multiple
        self._fps = Fraction(fps).limit_denominator(1001)
        self._container: OutputContainer = av.open(io.BytesIO(), "w", format="mp4")
        """Only for its encoder."""
        self._stream: VideoStream | None = None
        self._frames = 0

    def add(self, frames: Frames) -> bytes:
        """The next frames, all of one size: [frames, height, width, 3] uint8. Returns their bytes; those of the first
        frame have the file's head."""
        check_frames(frames)
        made = []
        for pixels in frames:
            if self._stream is None:
                # no look-ahead: it would hold frames back
                self._stream = video_stream(self._container, self._fps, pixels, tune="zerolatency")
                self._container.start_encoding()
            made += [
                self._fragment(self._stream, packet) for packet in self._stream.encode(as_yuv(pixels, self._stream))
            ]
        return b"".join(made)

    def close(self) -> None:
        """Free the encoder."""
        self._container.close()

    def _fragment(self, stream: VideoStream, packet: Packet) -> bytes:
        self._frames += 1
        file = io.BytesIO()
        options = {**_OPTIONS, "fragment_index": str(self._frames)}
        with av.open(file, "w", format="mp4", options=options) as container:
            packet.stream = container.add_stream_from_template(stream)
            container.mux_one(packet)
        data = file.getvalue()
        data = data if self._frames == 1 else data[_head(data) :]
        return data if len(data) % self._multiple == 0 else data + _free(-(len(data) + _BOX) % self._multiple)


def _free(content: int) -> bytes:
    """A box that readers skip."""
    return (_BOX + content).to_bytes(4) + b"free" + bytes(content)


def _head(data: bytes) -> int:
    """Size of the boxes before the first fragment."""
    at = 0
    while data[at + 4 : at + _BOX] != b"moof":
        at += int.from_bytes(data[at : at + 4])
    return at
