"""MP4 files: what is written is what a player reads, and nothing half-written is left."""

from __future__ import annotations

import os
from pathlib import Path

import av
import numpy as np
import pytest

from segue.media.write_video import VideoWriter
from segue.orchestrator.omni.outputs import Audio, Video


def moving(frames: int, height: int, width: int) -> np.ndarray:
    """A red, a green and a blue field whose brightness changes from frame to frame."""
    made = np.zeros((frames, height, width, 3), dtype=np.uint8)
    for number in range(frames):
        level = 60 + 180 * number // max(1, frames - 1)
        for channel, columns in enumerate(np.array_split(np.arange(width), 3)):
            made[number, :, columns, channel] = level
    return made


def read(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        frames = [
            frame.reformat(format="rgb24", src_colorspace="ITU709").to_ndarray() for frame in container.decode(video=0)
        ]
    return np.stack(frames)


@pytest.mark.parametrize(("height", "width"), [(48, 96), (47, 95)])
def test_frames_come_back(tmp_path: Path, height: int, width: int) -> None:
    frames = moving(9, height, width)
    path = tmp_path / "clip.mp4"
    with VideoWriter(path, fps=24) as video:
        for piece in (frames[:1], frames[1:5], frames[5:]):
            video.add(piece)
            assert not path.exists(), "it has its name when it is whole"
    back = read(path)
    assert back.shape == (9, height + height % 2, width + width % 2, 3)
    middle = slice(4, height - 4)
    for columns in (slice(4, width // 3 - 4), slice(2 * width // 3 + 4, width - 4)):
        apart = back[:, middle, columns].astype(int) - frames[:, middle, columns]
        assert abs(apart).max() < 12, "colours are those that were written"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate, stream.frames) == ("h264", 24, 9)
        assert not container.streams.audio
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat"), "players may begin at once"


@pytest.mark.parametrize("fps", [12.5, 29.97, 16.0])
def test_frame_rates_and_audio(tmp_path: Path, fps: float) -> None:
    tone = np.sin(np.arange(24000) / 24000 * 2 * np.pi * 440).astype(np.float32)
    path = tmp_path / "clip.mp4"
    Video(moving(round(fps), 32, 48), fps).save(path, audio=Audio(tone, 24000))
    with av.open(str(path)) as container:
        assert float(container.streams.video[0].average_rate) == pytest.approx(fps, rel=1e-3)
        audio = container.streams.audio[0]
        assert (audio.codec_context.name, audio.rate) == ("aac", 24000)
        samples = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    assert abs(len(samples) - 24000) < 3000
    assert np.abs(np.fft.rfft(samples[:24000])).argmax() == pytest.approx(440, abs=10)


def breaks_off(path: Path) -> None:
    with VideoWriter(path, fps=16) as video:
        video.add(moving(3, 32, 32))
        raise RuntimeError


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with pytest.raises(RuntimeError):
        breaks_off(path)
    with pytest.raises(ValueError, match="at least one frame"):
        VideoWriter(path, fps=16).close()
    video = VideoWriter(path, fps=16)
    video.add(moving(1, 32, 32))
    with pytest.raises(ValueError, match="64 x 32"):
        video.add(moving(1, 64, 32))
    with pytest.raises(ValueError, match="uint8"):
        video.add(moving(1, 32, 32).astype(np.float32))
    with pytest.raises(ValueError, match="sample_rate"):
        video.add_audio(np.zeros(5, dtype=np.float32))
    video.discard()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="nowhere"):
        VideoWriter(tmp_path / "nowhere" / "clip.mp4", fps=16)


def test_a_file_called_part_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4.part").write_text("a download")
    Video(moving(2, 32, 32), 16).save(tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4.part").read_text() == "a download"
    assert {path.name for path in tmp_path.iterdir()} == {"clip.mp4", "clip.mp4.part"}


def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / f".clip.mp4.{os.getpid()}.part").symlink_to("/dev/full")
    noise = np.random.default_rng(0).integers(0, 255, (16, 240, 320, 3), dtype=np.uint8)
    with pytest.raises(OSError, match="No space left"):
        Video(noise, 16).save(tmp_path / "clip.mp4")
    assert list(tmp_path.iterdir()) == []
