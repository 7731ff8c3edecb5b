"""POST /v1/images/generations as the official client uses it, and as a careless one does."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_service import FakeService, Gate, Live, live, sent
from painter import STEPS, finished, make_image, paint, painter, pixels
from PIL import Image

from segue.messages.deltas import Delta
from segue.messages.errors import StageFailed
from segue.messages.request import Request

URL = "/v1/images/generations"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(painter()) as server:
        yield server


def opened(encoded: str | None) -> tuple[str | None, np.ndarray]:
    """(format, [height, width, 3]) of a file in base64."""
    assert encoded is not None
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        return image.format, np.asarray(image)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "painter", "prompt": "a red bicycle", **fields}


def test_one_image(client: openai.OpenAI, server: Live) -> None:
    server.service.requests.clear()
    answer = client.images.generate(model="painter", prompt="a red bicycle", size="96x64")
    assert answer.data is not None
    [image] = answer.data
    kind, array = opened(image.b64_json)
    assert kind == "PNG"
    assert np.array_equal(array, pixels(0, 64, 96))
    assert (answer.size, answer.output_format, answer.background) == ("96x64", "png", "opaque")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.total_tokens) == (5, 5)
    assert answer.usage.input_tokens_details.text_tokens == 5
    [request] = server.service.requests
    assert request.prompt == "a red bicycle"
    assert request.modalities == ["image"]
    assert not request.messages
    assert answer.model_dump()["seed"] == request.seed  # drawn; it makes the image again
    client.images.generate(model="painter", prompt="a red bicycle", size="96x64")
    assert server.service.requests[-1].seed != request.seed


def test_several_in_order_and_what_pipelines_take(client: openai.OpenAI, server: Live) -> None:
    server.service.requests.clear()
    more = {"negative_prompt": "grey", "num_inference_steps": 9, "true_cfg_scale": 2.5, "seed": 7, "priority": -1}
    answer = client.images.generate(model="painter", prompt="x", n=3, size="auto", user="me", extra_body=more)
    assert answer.data is not None
    for index, image in enumerate(answer.data):
        assert np.array_equal(opened(image.b64_json)[1], pixels(index, 64, 96))
    [request] = server.service.requests
    params = request.diffusion
    assert params is not None
    assert (params.num_images_per_prompt, params.height, params.width) == (3, None, None)
    assert (params.negative_prompt, params.num_inference_steps, params.true_cfg_scale) == ("grey", 9, 2.5)
    assert (request.seed, request.priority, request.tenant) == (7, -1, "me")


@pytest.mark.parametrize(("name", "kind", "within"), [("png", "PNG", 0), ("webp", "WEBP", 12), ("jpeg", "JPEG", 12)])
def test_formats(client: openai.OpenAI, name: Any, kind: str, within: int) -> None:
    answer = client.images.generate(model="painter", prompt="x", output_format=name)
    assert answer.data is not None
    found, array = opened(answer.data[0].b64_json)
    assert found == kind
    assert np.abs(array.astype(int) - pixels(0, 64, 96).astype(int)).max() <= within


def test_compression_makes_files_smaller(client: openai.OpenAI) -> None:
    sizes = []
    for compression in (0, 50, 100):
        answer = client.images.generate(
            model="painter", prompt="x", output_format="jpeg", output_compression=compression
        )
        assert answer.data is not None
        sizes.append(len(answer.data[0].b64_json or ""))
    assert sizes[0] < sizes[1] < sizes[2]


def test_streamed(client: openai.OpenAI) -> None:
    """Previews, then the image with the usage."""
    with client.images.generate(model="painter", prompt="x", stream=True, partial_images=2) as stream:
        events = list(stream)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    for number, event in enumerate(events[:2]):
        assert event.type == "image_generation.partial_image"
        assert event.partial_image_index == number
        assert event.size == "48x32"
        assert np.array_equal(opened(event.b64_json)[1], pixels(0, 32, 48))
    last = events[-1]
    assert last.type == "image_generation.completed"
    assert np.array_equal(opened(last.b64_json)[1], pixels(0, 64, 96))
    assert last.usage.input_tokens == 5


def test_streamed_steps_and_several(http: httpx.Client, server: Live) -> None:
    with http.stream("POST", URL, json=body(stream=True, n=2, progress=True)) as answer:
        lines = [line for line in answer.iter_lines() if line]
    kinds = [line.removeprefix("event: ") for line in lines[::2]]
    data = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert kinds == [entry["type"] for entry in data]
    steps = [(entry["image_index"], entry["step"], entry["steps"]) for entry in data if "step" in entry]
    assert steps == [(index, step + 1, STEPS) for step in range(STEPS) for index in (0, 1)]
    done = [entry for entry in data if entry["type"] == "image_generation.completed"]
    assert [entry["image_index"] for entry in done] == [0, 1]
    assert done[0]["usage"] is None
    assert done[0]["seed"] == done[1]["seed"] == server.service.requests[-1].seed
    assert done[1]["usage"]["input_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"size": "big"}, 400, "size", "WIDTHxHEIGHT"),
        ({"size": "65x64"}, 400, "size", "64 or 80"),
        ({"size": "0x64"}, 400, "size", "WIDTHxHEIGHT"),
        ({"width": 65, "height": 64}, 400, "width", "64 or 80"),
        ({"size": "64x64", "height": 64}, 400, "size", "give one"),
        ({"n": 0}, 400, "n", "at least 1"),
        ({"n": 11}, 413, "n", "at most 10"),
        ({"n": 2, "num_images_per_prompt": 3}, 400, "n", "give one"),
        ({"n": "two"}, 400, "n", "int"),
        ({"response_format": "url"}, 400, "response_format", "b64_json"),
        ({"response_format": "uri"}, 400, "response_format", "b64_json"),
        ({"output_format": "gif"}, 400, "output_format", "png"),
        ({"output_format": ""}, 400, "output_format", "png"),
        ({"output_compression": 50}, 400, "output_compression", "webp or jpeg"),
        ({"output_compression": 101, "output_format": "webp"}, 400, "output_compression", "0 to 100"),
        ({"background": "transparent"}, 400, "background", "opaque"),
        ({"quality": "high"}, 400, "quality", "auto"),
        ({"style": "vivid"}, 400, "style", "leave it out"),
        ({"partial_images": 2}, 400, "partial_images", "stream"),
        ({"partial_images": -1, "stream": True}, 400, "partial_images", "at least 0"),
        ({"num_inference_step": 3}, 400, "num_inference_step", "num_inference_steps"),
        ({"num_inference_steps": 0}, 400, "num_inference_steps", "at least 1"),
        ({"num_inference_steps": "many"}, 400, "num_inference_steps", "int"),
        ({"num_inference_steps": 2**70}, 400, "num_inference_steps", "too large"),
        ({"original_size": [2**70, 1]}, 400, "original_size", "too large"),
        ({"guidance_scale": -1}, 400, "guidance_scale", "from 0"),
        ({"seed": 2**65}, 400, "seed", "64 bits"),
        ({"n": 2**64}, 400, "n", "64 bits"),
        ({"prompt": "x" * 32_001}, 400, "prompt", "32000"),
        ({"prompt": 7}, 400, "prompt", "str"),
        ({"negative_prompt": "x" * 32_001}, 400, "negative_prompt", "32000"),
        ({"model": "another"}, 404, "model", "painter"),
        ({"deadline": -1}, 400, "deadline", "above 0"),
        ({"priority": 2**40}, 400, "priority", "32-bit"),
        ({"image": "data:,"}, 400, "image", "unknown parameter 'image'; here: input images and masks"),
        ({"mask": "data:,"}, 400, "mask", "/v1/images/edits"),
        ({"input_reference": "data:,"}, 400, "input_reference", "/v1/videos"),
        ({"num_images": 2}, 400, "num_images", "here: n"),
        ({"steps": 2}, 400, "steps", "here: num_inference_steps"),
        ({"cfg_scale": 2}, 400, "cfg_scale", "here: guidance_scale or true_cfg_scale"),
        ({"sampler": "Euler"}, 400, "sampler", "here: scheduler"),
        ({"lora": "poet"}, 400, "lora", "goes into model"),
        ({"negative_promt": "grey"}, 400, "negative_promt", "did you mean 'negative_prompt'"),
    ],
)
def test_refused(http: httpx.Client, fields: dict[str, Any], status: int, param: str | None, says: str) -> None:
    for streams in (False, True):
        if "partial_images" in fields and streams:
            continue
        answer = http.post(URL, json={**body(), **({"stream": True} if streams else {}), **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
        assert param is None or error["param"] == param
        assert says in error["message"]


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    harmless = {"background": "auto", "quality": "auto", "moderation": "low", "style": None, "metadata": {"a": "b"}}
    answer = http.post(URL, json=body(**harmless, height=None, num_images_per_prompt=None, partial_images=0))
    assert answer.status_code == 200, answer.text
    without = http.post(URL, json={"prompt": "x"})
    assert without.status_code == 200, "there is one model"


def test_a_model_of_images_shows_no_tokens(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "model", "unsupported_parameter")


def test_a_model_that_makes_no_images() -> None:
    service = FakeService()
    service.card.gives = frozenset({"text"})
    with live(service) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        error = http.post(URL, json={"model": "fake-omni", "prompt": "x"}).json()["error"]
    assert (error["param"], error["code"]) == ("model", "unsupported_parameter")
    assert "no image" in error["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_who_leaves_is_cancelled(streams: bool) -> None:
    service = painter()
    gate = Gate()

    async def slowly(request: Request) -> AsyncGenerator[Delta]:
        yield make_image(0, 32, 32, 0)
        await gate.wait()
        yield finished()

    service.script = slowly
    with live(service) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        if streams:
            with http.stream("POST", URL, json=body(stream=True, partial_images=1)) as answer:
                next(answer.iter_lines())
        else:
            sock = sent(server.port, URL, body())
            assert gate.reached.wait(120)
            sock.close()
        assert service.cancelled.get(timeout=120) == service.requests[0].request_id


def test_an_error_on_the_way(client: openai.OpenAI, server: Live) -> None:
    async def breaks(request: Request) -> AsyncGenerator[Delta]:
        yield make_image(0, 32, 32, 0)
        raise StageFailed("it broke", stage="denoiser")

    server.service.script = breaks
    try:
        with client.images.generate(model="painter", prompt="x", stream=True, partial_images=1) as stream:
            assert next(stream).type == "image_generation.partial_image"
            with pytest.raises(openai.APIError, match="it broke"):
                next(stream)
        with pytest.raises(openai.InternalServerError, match="it broke"):
            client.images.generate(model="painter", prompt="x")
    finally:
        server.service.script = paint


def test_options_of_the_family(http: httpx.Client, server: Live) -> None:
    answer = http.post(URL, json=body(options={"use_audio_in_video": True}))
    assert answer.status_code == 200
    assert server.service.requests[-1].options == {"use_audio_in_video": True}
    wrong = http.post(URL, json=body(options={"use_audio": True})).json()["error"]
    assert wrong["param"] == "options.use_audio"
    assert "did you mean 'use_audio_in_video'" in wrong["message"]
