"""What a client hears of images and videos: each thing once, whatever attempt it came from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from segue.engines.contract import StageOutput, StageRequest
from segue.graph.walk import WalkStage
from segue.messages.deltas import ClientDelta, ImageDelta, ProgressDelta, VideoDelta
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import StageFailed
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.messages.wire import Emission
from segue.orchestrator.omni.outputs import Collector
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.requests.request_state import RequestState
from segue.worker import deltas


def took(state: RequestState, *deltas: ClientDelta, attempt: int = 0) -> list[ClientDelta]:
    return state.took(Emission("r", deltas[0].stage, attempt, deltas=list(deltas)))


@pytest.fixture
def state() -> RequestState:
    nothing: frozenset[str] = frozenset()
    walk = {
        "input": WalkStage(nothing, frozenset({"decoder"}), nothing),
        "decoder": WalkStage(frozenset({"input"}), nothing, frozenset({"image"})),
    }
    return RequestState(Request(request_id="r"), walk, "decoder", ClientQueue(1 << 20))


def make_image(index: int, partial: int | None = None) -> ImageDelta:
    return ImageDelta("decoder", bytes([index] * 12), 2, 2, index, partial)


def clip(first: int, frames: int, index: int = 0) -> VideoDelta:
    data = bytes(frame for frame in range(first, first + frames) for _ in range(12))
    return VideoDelta("decoder", data, frames, 2, 2, 8.0, index, first)


def test_progress_goes_on_where_it_was(state: RequestState) -> None:
    steps = [ProgressDelta("denoiser", step, 4) for step in (1, 2, 3, 4)]
    assert took(state, *steps[:3]) == steps[:3]
    assert took(state, *steps, attempt=1) == steps[3:]
    other = ProgressDelta("denoiser", 1, 4, index=1)
    assert took(state, other) == [other]


def test_images_in_any_order_come_once(state: RequestState) -> None:
    assert took(state, make_image(1)) == [make_image(1)]
    assert took(state, make_image(0), make_image(1), attempt=1) == [make_image(0)]


def test_no_preview_of_what_is_there_or_was_seen(state: RequestState) -> None:
    assert took(state, make_image(0, 0), make_image(0, 1)) == [make_image(0, 0), make_image(0, 1)]
    assert took(state, make_image(0, 0), make_image(0, 1), make_image(0, 2), attempt=1) == [make_image(0, 2)]
    assert took(state, make_image(0)) == [make_image(0)]
    assert took(state, make_image(0, 3)) == []
    assert took(state, make_image(1, 0)) == [make_image(1, 0)]


def test_frames_are_units(state: RequestState) -> None:
    assert took(state, clip(0, 3)) == [clip(0, 3)]
    assert took(state, clip(0, 2), clip(2, 3), attempt=1) == [clip(3, 2)]
    assert took(state, clip(0, 3, index=1), attempt=1) == [clip(0, 3, index=1)]


def test_collected_by_index_without_previews() -> None:
    collector = Collector("r", wants_audio=False)
    for delta in (make_image(0, 0), make_image(1), clip(0, 2, 1), clip(0, 1), make_image(0), clip(2, 3, 1)):
        collector.add(delta)
    output = collector.output()
    assert [np.asarray(image)[0, 0, 0] for image in output.images] == [0, 1]
    assert [video.frames.shape for video in output.videos] == [(1, 2, 2, 3), (5, 2, 2, 3)]
    assert [video.fps for video in output.videos] == [8.0, 8.0]
    assert output.videos[1].frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def stage_request(*to_client: str, **diffusion: Any) -> StageRequest:
    request = Request(request_id="r", diffusion=DiffusionParams(**diffusion))
    return StageRequest("r", "decoder", request, FALLBACK, 0, frozenset(), frozenset(), frozenset(to_client))


def client_deltas(request: StageRequest, output: StageOutput) -> list[ClientDelta]:
    return deltas.client_deltas(request, output, Counter())


def test_what_a_stage_tells_the_client() -> None:
    pixels = torch.arange(24, dtype=torch.uint8)
    shown = StageOutput("r", payload={"image": pixels[:12].reshape(2, 2, 3), "index": 2, "partial": 1})
    video = StageOutput("r", payload={"video": pixels.reshape(2, 2, 2, 3), "fps": 8, "index": 1, "first": 3})
    [image] = client_deltas(stage_request("image"), shown)
    assert image == ImageDelta("decoder", bytes(range(12)), 2, 2, 2, 1)
    assert client_deltas(stage_request("video"), shown) == [image], "a preview of a video is an image"
    assert client_deltas(stage_request(), shown) == []
    assert client_deltas(stage_request("video"), video) == [VideoDelta("decoder", bytes(range(24)), 2, 2, 2, 8.0, 1, 3)]
    step = StageOutput("r", index=1, progress=(3, 5))
    assert client_deltas(stage_request(progress=True), step) == [ProgressDelta("decoder", 3, 5, 1)]
    assert client_deltas(stage_request(), step) == []
    for payload in ({"image": pixels.reshape(2, 12)}, {"video": pixels.reshape(2, 4, 3), "fps": 8}):
        with pytest.raises(StageFailed, match="shape"):
            client_deltas(stage_request("image", "video"), StageOutput("r", payload=payload))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (
            {"audio": torch.zeros(4), "rate": 8000},
            r"gave a payload with \['audio', 'rate'\]; it must have audio under 'samples'",
        ),
        ({"samples": np.zeros(4), "sample_rate": 8000}, "gave samples of type ndarray; they must be a tensor"),
    ],
)
def test_what_a_client_would_never_get_is_an_error(payload: dict[str, Any], says: str) -> None:
    output = StageOutput("one", payload=payload)
    with pytest.raises(StageFailed, match=says):
        client_deltas(stage_request("audio"), output)
    assert client_deltas(stage_request(), output) == [], "it is for another stage"
