"""A model that makes video, whole: from Python, streamed frame by frame, and with its workers killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from truth_system import System

from segue.messages.deltas import Delta, EncodedDelta, Finished, ImageDelta, ProgressDelta, VideoDelta
from segue.messages.errors import InvalidRequest
from segue.messages.formats import Format
from segue.models.images.wan import tiny
from segue.orchestrator.omni.outputs import RequestOutput

FIRST = Image.fromarray(np.linspace(0, 255, 40 * 50 * 3).astype(np.uint8).reshape(40, 50, 3))
LAST = FIRST.rotate(180)
ASKED: dict[str, Any] = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey",
    "image": FIRST,
    "last_image": LAST,
    "height": 64,
    "width": 64,
    "num_frames": 13,
    "num_inference_steps": 6,
    "guidance_scale": 3.0,
    "guidance_scale_2": 2.0,
    "num_videos_per_prompt": 2,
    "seed": 3,
    "progress": True,
    "partial_images": 1,
}


@pytest.fixture(scope="module")
def camera(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("wan")
    tiny.make(directory, "2.2-i2v")
    camera = System(directory)
    yield camera
    camera.close()


@pytest.fixture(scope="module")
def truth(camera: System) -> RequestOutput:
    output, _ = camera.run(camera.observe(ASKED))
    return output


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """Sums are rounded in another order in another batch: one level of 255."""
    assert len(one.videos) == len(other.videos) == 2
    for mine, yours in zip(one.videos, other.videos, strict=True):
        assert mine.frames.shape == yours.frames.shape == (13, 64, 64, 3)
        assert np.abs(mine.frames.astype(int) - yours.frames.astype(int)).max() <= 1


def check_deltas(deltas: list[Delta]) -> None:
    """Everything once: each step of each video in order, and its frames in pieces, one and then four at a time."""
    assert isinstance(deltas[-1], Finished)
    for index in (0, 1):
        steps = [delta.step for delta in deltas if isinstance(delta, ProgressDelta) and delta.index == index]
        assert steps == [1, 2, 3, 4, 5, 6]
        pieces = [delta for delta in deltas if isinstance(delta, VideoDelta) and delta.index == index]
        assert [(piece.start, piece.frames, piece.fps) for piece in pieces] == [
            (0, 1, 16.0),
            (1, 4, 16.0),
            (5, 4, 16.0),
            (9, 4, 16.0),
        ]
        previews = [delta for delta in deltas if isinstance(delta, ImageDelta) and delta.index == index]
        assert [(delta.partial, delta.height, delta.width) for delta in previews] in ([(0, 32, 32)], [])


def test_streamed(camera: System, truth: RequestOutput, tmp_path: Path) -> None:
    output, deltas = camera.run(camera.observe(ASKED))
    assert_same(output, truth)
    check_deltas(deltas)
    assert sum(isinstance(delta, ImageDelta) for delta in deltas) == 2, "a preview of each"
    assert output.metrics.attempts == 1
    first, second = (video.frames.astype(int) for video in output.videos)
    assert np.abs(first - second).mean() > 5
    assert output.images == []
    output.videos[0].save(tmp_path / "boat.mp4")
    with av.open(str(tmp_path / "boat.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == 13


def test_arguments_are_those_of_the_pipeline(camera: System, truth: RequestOutput) -> None:
    prompt, settings = ASKED["prompt"], {key: ASKED[key] for key in ASKED if key != "prompt"}
    output = camera.run(camera.omni.generate(prompt, **settings))
    assert_same(output, truth)
    other = camera.run(camera.omni.generate(prompt, **{**settings, "image": LAST, "fps": 8}))
    assert np.abs(other.videos[0].frames.astype(int) - truth.videos[0].frames.astype(int)).mean() > 2
    assert other.videos[0].fps == 8


@pytest.mark.parametrize(("stage", "after"), [("denoiser", ProgressDelta), ("decoder", VideoDelta)])
def test_killed_on_the_way(camera: System, truth: RequestOutput, stage: str, after: type[Delta]) -> None:
    """The same videos, and no frame twice: of those that were out, only what is missing comes."""
    killed = []

    def kill(delta: Delta) -> None:
        if isinstance(delta, after) and not killed:
            killed.append(delta)
            camera.kill(stage)

    output, deltas = camera.run(camera.observe(ASKED, kill))
    assert killed
    assert_same(output, truth)
    check_deltas(deltas)


def test_the_file_is_the_same_after_a_kill(camera: System) -> None:
    """kill -9 of the output stage when the first frame has been encoded. The other stages are not run again: they may
    round otherwise."""

    async def file(*, kill: bool) -> tuple[dict[str, bytes], int]:
        request = camera.omni.request({**ASKED, "num_videos_per_prompt": 1})
        request.formats = {"video": Format(name="mp4", poster=True), "image": Format(name="png")}
        made: dict[str, bytes] = {}
        attempts = 0
        async for delta in camera.omni.stream(request):
            assert not isinstance(delta, VideoDelta | ImageDelta)
            if isinstance(delta, EncodedDelta):
                made[delta.kind] = made.get(delta.kind, b"") + delta.data
                if delta.kind == "poster" and kill:
                    camera.kill("output")
            elif isinstance(delta, Finished):
                attempts = delta.metrics.attempts
        return made, attempts

    camera.run(file(kill=False))  # the first request of all is computed without what is cached
    undisturbed, _ = camera.run(file(kill=False))
    assert sorted(undisturbed) == ["poster", "preview", "video"]
    again, attempts = camera.in_time(lambda: file(kill=True), lambda found: found[1] == 2)
    assert (again, attempts) == (undisturbed, 2)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"num_frames": 12}, "num_frames"),
        ({"height": 72}, "height"),
        ({"image": None, "last_image": None}, "image"),
        ({"image": None}, "last_image"),
        ({"num_frames": "many"}, "num_frames"),
        ({"true_cfg_scale": 3.0}, "true_cfg_scale"),
    ],
)
def test_refused(camera: System, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        camera.run(camera.omni.generate({**ASKED, **wrong}))
    assert field in str(caught.value.field)
