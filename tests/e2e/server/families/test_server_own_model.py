"""The example of a model of one's own over HTTP and on the command line: images and actions in, frames out."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from server_process import Served, segue, served
from websockets.exceptions import ConnectionClosedOK
from websockets.sync.client import ClientConnection, connect

from own_model_package import Author, given, installed

FRAMES, ACTIONS = given(0, 2, 4)


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Author]:
    with installed(tmp_path_factory.mktemp("installed")):
        yield Author(tmp_path_factory.mktemp("action-video"))


@pytest.fixture(scope="module")
def server(author: Author) -> Iterator[Served]:
    with served(author.directory) as server:
        yield server


def as_png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "png")
    return file.getvalue()


def body(*tensors: dict[str, Any], **more: Any) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(as_png(frame)).decode()}" for frame in FRAMES]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*images, *tensors]}], **more}


def tensor(**fields: Any) -> dict[str, Any]:
    return {"type": "tensor", "name": "actions", **fields}


def pixels(image: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)))


def test_frames_are_streamed_as_images(server: Served, author: Author) -> None:
    lists = tensor(data=ACTIONS[:3].tolist())
    encoded = tensor(data=base64.b64encode(ACTIONS[3:].tobytes()).decode(), dtype="float32", shape=[1, 6, 3])
    with server.client() as http:
        assert http.get("/v1/models").json()["data"][0]["tensors"] == {
            "actions": {"dtype": "float32", "shape": [6, 3], "tokens": 6, "most": 15}
        }
        asked = body(lists, encoded, stream=True)
        with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
        whole = http.post("/v1/chat/completions", json=body(lists, encoded)).json()
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    frames = [pixels(image) for delta in deltas for image in delta.get("images", [])]
    assert [len(delta["images"]) for delta in deltas if "images" in delta] == [1, 1, 1], "each in its own event"
    _, video = author.imagine(FRAMES, ACTIONS)
    np.testing.assert_allclose(np.stack(frames), video, atol=0.5 + 1e-2)
    images = whole["choices"][0]["message"]["images"]
    np.testing.assert_array_equal(np.stack([pixels(image) for image in images]), np.stack(frames))


def streamed(server: Served, seen: Callable[[int], object] = id, **more: Any) -> tuple[bytes, list[int]]:
    """The video of a streamed completion, and the frames that its file had after each event. `seen` gets their number
    at each."""
    data, counts = b"", []
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json=body(**more)) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and (video := delta_in(line.removeprefix("data: ")).get("video")):
                data += base64.b64decode(video["data"])
                counts.append(video["frames"])
                seen(video["frames"])
    return data, counts


def delta_in(message: str | bytes) -> dict[str, Any]:
    value = json.loads(message)
    assert "error" not in value, value
    delta: dict[str, Any] = value["choices"][0]["delta"]
    return delta


def shown(file: bytes) -> np.ndarray:
    """The frames of an MP4 file: [frames, height, width, 3]."""
    with av.open(io.BytesIO(file)) as container:
        frames = [frame.reformat(format="rgb24", src_colorspace="ITU709") for frame in container.decode(video=0)]
    return np.stack([frame.to_ndarray() for frame in frames])


def test_a_video_is_streamed_frame_by_frame(server: Served, author: Author) -> None:
    """As a fragmented MP4; and its bytes are the same if the worker that makes them is killed."""
    given = [tensor(data=ACTIONS.tolist())]
    asked = {**body(*given), "modalities": ["video"], "stream": True}
    data, counts = streamed(server, **asked)
    assert counts == [1, 2, 3]
    _, video = author.imagine(FRAMES, ACTIONS)
    assert np.abs(shown(data).astype(float) - video).mean() < 12, "it is compressed"

    def kill(frames: int) -> None:
        if frames == 1:
            os.kill(server.pid("output"), signal.SIGKILL)

    again, counts = streamed(server, kill, **asked)
    assert (again, counts) == (data, [1, 2, 3])
    server.until(lambda _: server.health()["stages"]["output"]["replicas"][0]["restarts"] >= 1)


def test_a_video_job(server: Served, author: Author) -> None:
    """An MP4 file of one frame and the actions after it."""
    frames = FRAMES[:1]
    url = body()["messages"][0]["content"][0]["image_url"]["url"]
    with server.client() as http:
        wrong = http.post("/v1/videos", json={"input_reference": url, "tensors": {"actions": [[1.0, 2.0]]}})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tensors['actions'].shape")
        job = http.post("/v1/videos", json={"input_reference": url, "tensors": {"actions": ACTIONS.tolist()}}).json()
        server.until(lambda _: http.get(f"/v1/videos/{job['id']}").json()["status"] in ("completed", "failed"))
        assert http.get(f"/v1/videos/{job['id']}").json()["seconds"] == "0.5"
        file = http.get(f"/v1/videos/{job['id']}/content").content
    _, video = author.imagine(frames, ACTIONS)
    assert np.abs(shown(file).astype(float) - video).mean() < 12, "it is compressed"


def opened(server: Served) -> ClientConnection:
    url = server.url.replace("http", "ws", 1) + "/v1/chat/completions/stream"
    return connect(url, max_size=None, open_timeout=120, proxy=None)


def test_actions_appended_over_a_websocket(server: Served, author: Author) -> None:
    """Each when the frame before it has come; a wrong one changes nothing. The video is that of all actions at once."""
    at_once, _ = streamed(server, **body(tensor(data=ACTIONS.tolist())), modalities=["video"], stream=True)
    config = {"type": "session.config", **body(tensor(data=ACTIONS[:1].tolist())), "modalities": ["video", "image"]}
    video, frames, errors, ends = b"", [], [], []
    with opened(server) as socket:

        def send(message: dict[str, Any]) -> None:
            socket.send(json.dumps(message))

        def append(number: int) -> None:
            send({"type": "input.append", "content": [tensor(data=ACTIONS[number].tolist())]})

        send(config)
        append(1)
        while not ends:
            value = json.loads(socket.recv(timeout=60))
            if "error" in value:
                errors.append(value["error"]["param"])
                append(len(frames) + 1)
                continue
            choice = value["choices"][0]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            if "video" in choice["delta"]:
                video += base64.b64decode(choice["delta"]["video"]["data"])
            if "images" in choice["delta"]:
                frames += [pixels(image) for image in choice["delta"]["images"]]
                if len(frames) == 3:
                    send({"type": "input.done"})
                else:
                    send({"type": "input.append", "content": [tensor(data=ACTIONS[0, :2].tolist())]})
        with pytest.raises(ConnectionClosedOK):
            socket.recv(timeout=60)
    assert (errors, ends) == (["content[0].shape"] * 2, ["stop"])
    _, expected = author.imagine(FRAMES, ACTIONS)
    np.testing.assert_allclose(np.stack(frames), expected, atol=0.5 + 1e-2)
    assert video == at_once


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        (tensor(data=ACTIONS[:, :2].tolist()), "messages[0].content[2].shape", "is [4, 2, 3]; of actions it must be"),
        (tensor(data=ACTIONS.tolist(), name="acts"), "messages[0].content[2]", "is of kind 'acts'; this model takes"),
        (tensor(data=ACTIONS[:1].tolist()), "messages", "1 items of actions for 2 images; the model needs at least 2"),
    ],
)
def test_a_wrong_tensor_is_a_bad_request(server: Served, part: dict[str, Any], param: str, says: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json=body(part))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.nightly
def test_a_video_on_the_command_line(author: Author, tmp_path: Path) -> None:
    for index, frame in enumerate(FRAMES):
        (tmp_path / f"{index}.png").write_bytes(as_png(frame))
    np.save(tmp_path / "actions.npy", ACTIONS)
    images = [word for index in range(2) for word in ("--image", str(tmp_path / f"{index}.png"))]
    made = str(tmp_path / "made.mp4")
    run = segue("generate", str(author.directory), *images, "--tensor", f"actions={tmp_path}/actions.npy", "-o", made)
    assert run.returncode == 0, run.stderr
    assert Path(made).stat().st_size > 500
    wrong = segue("generate", str(author.directory), *images, "--tensor", f"actions={images[1]}", "-o", made)
    assert wrong.returncode != 0
    assert "is not a readable .npy file" in wrong.stderr
