"""The example of a model of one's own over HTTP and on the command line: images and actions in, frames out."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from server_process import Served, segue, served

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
