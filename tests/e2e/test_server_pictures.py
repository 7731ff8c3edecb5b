"""`segue serve` on a model that makes pictures: what the official client gets is what the model makes."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from server_process import NAME, Served, segue, served

ASKED: dict[str, Any] = {"model": NAME, "prompt": "a small boat left the harbour", "size": "64x96"}
FEW: dict[str, Any] = {"num_inference_steps": 3, "seed": 5}

HELD = ("segue_requests", "segue_generations_in_flight", "segue_stage_requests", "segue_stage_retained_bytes")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("qwen-image")
    made = segue("tiny", "qwen-image", str(directory))
    assert made.returncode == 0, made.stderr
    with served(directory) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def pixels(encoded: str | None) -> np.ndarray:
    assert encoded is not None
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        return np.asarray(image).astype(int)


def test_pictures_whole_and_streamed(client: openai.OpenAI) -> None:
    """The same seed gives the same picture, another one another; the streamed one is the whole one."""
    whole = client.images.generate(**ASKED, n=2, extra_body=FEW)
    assert whole.data is not None
    first, second = (pixels(image.b64_json) for image in whole.data)
    assert first.shape == second.shape == (96, 64, 3)
    assert np.abs(first - second).mean() > 5
    assert whole.usage is not None
    with client.images.generate(**ASKED, stream=True, partial_images=1, extra_body=FEW) as stream:
        preview, done = list(stream)
    assert preview.type == "image_generation.partial_image"
    assert done.type == "image_generation.completed"
    assert pixels(preview.b64_json).shape == (48, 32, 3)
    assert np.abs(pixels(done.b64_json) - first).max() <= 1
    other = client.images.generate(**ASKED, extra_body={**FEW, "seed": 6})
    assert other.data is not None
    assert np.abs(pixels(other.data[0].b64_json) - first).mean() > 5


@pytest.mark.parametrize(
    ("wrong", "status", "param", "says"),
    [
        ({"size": "65x64"}, 400, "size", "64 or 80"),
        ({"size": "64000x64000"}, 413, "size", "max_output_pixels"),
        ({"n": 11}, 413, "n", "at most 10"),
        ({"num_inference_steps": 100_000}, 413, "num_inference_steps", "max_inference_steps"),
        ({"scheduler": "FlowMatchEuler"}, 400, "scheduler", "FlowMatchEulerDiscreteScheduler"),
        ({"num_frames": 9}, 400, "num_frames", "takes no num_frames"),
        ({"guidance_scale": 3.0}, 400, "guidance_scale", "true_cfg_scale"),
        ({"partial_images": 5, "stream": True}, 400, "partial_images", "3 steps"),
    ],
)
def test_refused(server: Served, wrong: dict[str, Any], status: int, param: str, says: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/images/generations", json={**ASKED, **FEW, **wrong})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert says in error["message"]


def test_edits_of_a_model_that_reads_no_pictures(server: Served) -> None:
    with server.client() as http:
        answer = http.post("/v1/images/edits", data={"prompt": "x"}, files={"image": ("a.png", b"x")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


def test_in_a_chat(client: openai.OpenAI) -> None:
    """The picture that the same words give as a prompt."""
    prompt = [{"role": "user", "content": ASKED["prompt"]}]
    chat = client.chat.completions.create(model=NAME, messages=prompt, extra_body={**FEW, "width": 64, "height": 96})
    [image] = chat.choices[0].message.model_dump()["images"]
    alone = client.images.generate(**ASKED, extra_body=FEW)
    assert alone.data is not None
    shown = pixels(image["image_url"]["url"].partition(",")[2])
    assert np.abs(shown - pixels(alone.data[0].b64_json)).max() <= 1


def test_who_leaves_frees_every_stage(server: Served) -> None:
    with server.client() as http:
        asked = {**ASKED, "num_inference_steps": 200, "size": "256x256", "stream": True, "progress": True}
        with http.stream("POST", "/v1/images/generations", json=asked) as answer:
            assert next(answer.iter_lines()) == "event: image_generation.progress"
    server.until(lambda metrics: not any(value for name in HELD for value in metrics[name].values()), within=10)
