"""Moving images in: a real file, raw frames, sampling, sound, and everything that is wrong with them."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from media_breaking import broken

from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.errors import InvalidRequest, TooLarge
from segue.messages.request import ArrayInfo, MediaPart

ASSETS = Path(__file__).parents[2] / "assets"
CLIP = (ASSETS / "video.mp4").read_bytes()
LIMITS = MediaLimits()
FIELD = "messages[1].content[0]"


def part(data: bytes, array: ArrayInfo | None = None) -> MediaPart:
    return MediaPart("video", data, array=array, field=FIELD)


def raw(frames: np.ndarray, rate: float | None = None) -> MediaPart:
    return part(frames.tobytes(), ArrayInfo(str(frames.dtype), frames.shape, rate))


def film(times: list[float], container: str = "matroska") -> bytes:
    """Lossless grey frames, the i-th of brightness 10 * i, shown at the given times."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as target:
        stream = target.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "gray"
        stream.codec_context.time_base = Fraction(1, 1000)
        for index, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16), 10 * index, np.uint8), format="gray")
            frame.pts, frame.time_base = round(time * 1000), Fraction(1, 1000)
            target.mux(stream.encode(frame))
        target.mux(stream.encode(None))
    return out.getvalue()


def shown(video_part: MediaPart, fps: float) -> list[int]:
    frames = decode_video(video_part, fps, LIMITS).frames
    return [round(float(frame.mean()) / 10) for frame in frames]


def test_clip_at_two_frames_a_second() -> None:
    video = decode_video(part(CLIP), 2.0, LIMITS)
    assert video.frames.shape == (4, 120, 160, 3)
    assert video.frames.dtype == np.uint8
    assert video.audio is None
    with av.open(io.BytesIO(CLIP)) as opened:
        every = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]
    wanted = [every[0], every[7], every[15], every[22]]  # shown at 0, 0.5, 1 and 1.5 s of 15 frames a second
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(video.frames, wanted, strict=True))


def test_audio_comes_along_when_wanted() -> None:
    audio = decode_video(part(CLIP), 2.0, LIMITS, audio_rate=16000).audio
    assert audio is not None
    assert 1.9 < len(audio) / 16000 < 2.2
    assert audio.std() > 0.01
    assert decode_video(part(film([0.0, 0.1])), 2.0, LIMITS, audio_rate=16000).audio is None


def test_each_sample_is_the_frame_then_on_the_screen() -> None:
    steady = part(film([i / 10 for i in range(20)]))
    assert shown(steady, 10.0) == list(range(20))
    assert shown(steady, 2.0) == [0, 5, 10, 15]
    assert shown(steady, 20.0) == [i // 2 for i in range(40)]
    assert shown(part(film([0.0, 0.1, 1.0])), 4.0) == [0, 1, 1, 1, 2]


def test_so_many_frames_evenly_over_the_clip() -> None:
    steady = part(film([i / 10 for i in range(20)]))
    frames = np.repeat(np.arange(20, dtype=np.uint8) * 10, 4 * 6 * 3).reshape(20, 4, 6, 3)
    for clip in (steady, raw(frames, 10.0), raw(frames)):
        for count, wanted in ((4, [0, 5, 10, 15]), (7, [0, 2, 5, 8, 11, 14, 17]), (40, [i // 2 for i in range(40)])):
            video = decode_video(clip, 2.0, LIMITS, count=count)
            assert [round(float(frame.mean()) / 10) for frame in video.frames] == wanted
            assert video.fps == pytest.approx(count / 2 if clip.array is None or clip.array.rate else count / 10)


def test_one_frame_is_a_video() -> None:
    assert shown(part(film([0.0])), 2.0) == [0]


def test_raw_frames() -> None:
    frames = np.repeat(np.arange(8, dtype=np.uint8) * 10, 4 * 6 * 3).reshape(8, 4, 6, 3)
    unknown = decode_video(raw(frames), 2.0, LIMITS)
    assert np.array_equal(unknown.frames, frames)
    assert unknown.fps == 2.0
    assert shown(raw(frames, 4.0), 2.0) == [0, 2, 4, 6]
    assert shown(raw(frames, 3.0), 2.0) == [0, 1, 3, 4, 6, 7]
    slow = decode_video(raw(frames, 1.0), 2.0, LIMITS)
    assert len(slow.frames) == 8
    assert slow.fps == 1.0


@pytest.mark.parametrize(
    ("shape", "dtype", "rate", "says"),
    [
        ((2, 4, 4), "uint8", None, "must be uint8 (frames, height, width, 3)"),
        ((2, 4, 4, 3), "float32", None, "must be uint8 (frames, height, width, 3)"),
        ((2, 4, 4, 4), "uint8", None, "must be uint8 (frames, height, width, 3)"),
        ((0, 4, 4, 3), "uint8", None, "empty"),
        ((2, 4, 4, 3), "uint8", 0.0, "rate"),
        ((2, 4, 4, 3), "uint8", float("inf"), "rate"),
    ],
)
def test_wrong_arrays_are_named(shape: tuple[int, ...], dtype: str, rate: float | None, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_video(raw(np.zeros(shape, dtype), rate), 2.0, LIMITS)
    assert says in caught.value.message
    assert caught.value.field == FIELD


@pytest.mark.parametrize(
    "data",
    [b"", b"no film at all", CLIP[:400], (ASSETS / "speech.wav").read_bytes()],
    ids=["empty", "text", "cut off", "sound"],
)
def test_broken_files_are_named(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_video(part(data), 2.0, LIMITS)
    assert FIELD in caught.value.message
    assert not isinstance(caught.value, TooLarge)


def test_limits_name_themselves() -> None:
    for limit, bound in (("max_video_seconds", 1.0), ("max_video_frames", 3), ("max_video_pixels", 50_000)):
        with pytest.raises(TooLarge, match=limit):
            decode_video(part(CLIP), 2.0, MediaLimits(**{limit: bound}))
        with pytest.raises(TooLarge, match=limit):
            decode_video(raw(np.zeros((8, 120, 160, 3), np.uint8), 4.0), 2.0, MediaLimits(**{limit: bound}))
    with pytest.raises(TooLarge, match="max_media_bytes"):
        decode_video(part(CLIP), 2.0, MediaLimits(max_bytes=1000))
    with pytest.raises(TooLarge, match="max_audio_seconds"):
        decode_video(part(CLIP), 2.0, MediaLimits(max_audio_seconds=1.0), audio_rate=16000)


FILES = [film([0.0, 0.1, 0.2]), CLIP]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(broken(FILES))
def test_no_file_crashes_it(data: bytes) -> None:
    try:
        video = decode_video(part(data), 2.0, LIMITS, audio_rate=16000)
    except InvalidRequest:
        return
    assert video.frames.ndim == 4
