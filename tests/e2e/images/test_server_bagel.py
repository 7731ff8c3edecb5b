"""`segue serve` on BAGEL: images from prompts, edited images, and what the model thinks before it draws, from OpenAI's
client; and nothing is left when clients leave."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from server_process import NAME, Served, pixels, served, tiny

FEW: dict[str, Any] = {"num_inference_steps": 4}
LAKE = "A red boat on a calm lake"


def png(height: int = 60, width: int = 90) -> bytes:
    ramp = np.linspace(0, 255, height * width * 3).astype(np.uint8).reshape(height, width, 3)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny(tmp_path_factory.mktemp("bagel") / "model", "bagel")) as server:
        yield server


def drawn(answer: Any) -> np.ndarray:
    return pixels(answer.data[0].b64_json)


def test_generations(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": LAKE, "size": "96x64"}
    one = client.images.generate(**asked, extra_body={**FEW, "seed": 1})
    same = client.images.generate(**asked, extra_body={**FEW, "seed": 1})
    other = client.images.generate(**asked, extra_body={**FEW, "seed": 2})
    assert drawn(one).shape == (64, 96, 3)
    assert np.abs(drawn(one) - drawn(same)).max() <= 1  # the second reads its prompt from the prefix cache
    assert np.abs(drawn(one) - drawn(other)).mean() > 1
    assert one.usage is not None
    assert (one.usage.input_tokens_details.image_tokens, one.usage.output_tokens) == (0, 24)
    assert one.usage.input_tokens_details.text_tokens == one.usage.input_tokens > 5
    several = client.images.generate(**asked, n=2, extra_body={**FEW, "seed": 1})
    assert several.data is not None
    assert len(several.data) == 2
    thought = client.images.generate(**asked, extra_body={**FEW, "seed": 1, "options": {"think": True}})
    assert np.abs(drawn(one) - drawn(thought)).mean() > 1


def test_edits(client: openai.OpenAI) -> None:
    made = [
        client.images.edit(model=NAME, image=png(), prompt=prompt, extra_body={**FEW, "seed": 3})
        for prompt in ("Make the sky green", "Remove the boat")
    ]
    assert drawn(made[0]).shape == (80, 128, 3)  # as large as the image that the model sees
    assert np.abs(drawn(made[0]) - drawn(made[1])).mean() > 1
    assert made[0].usage is not None
    assert made[0].usage.input_tokens_details.image_tokens > 40


def test_a_stored_image_is_gone_on_from(server: Served) -> None:
    """The file that the client got is what the model reads."""
    drawing = {"modalities": ["image"], "seed": 3, "height": 64, "width": 96, "store": True, **FEW}
    lake, ask = ({"role": "user", "content": text} for text in (LAKE, "What do you see?"))
    with server.client() as http:

        def answer(**body: Any) -> Any:
            reply = http.post("/v1/chat/completions", json={"model": NAME, **body})
            assert reply.status_code == 200, reply.text
            return reply.json()

        first = answer(messages=[lake], **drawing)
        image = first["choices"][0]["message"]["images"][0]
        text = {"max_tokens": 12, "return_token_ids": True}
        going_on = answer(messages=[ask], previous_response_id=first["id"], **text)
        whole = [{"role": "user", "content": [{"type": "text", "text": LAKE}, image]}, ask]
        at_once = answer(messages=whole, **text)
        assert going_on["choices"][0]["token_ids"] == at_once["choices"][0]["token_ids"]
        assert going_on["usage"]["prompt_tokens"] == at_once["usage"]["prompt_tokens"]
        assert going_on["usage"]["prompt_tokens_details"]["image_tokens"] > 0
        lost = http.post("/v1/chat/completions", json={"model": NAME, "messages": [ask], "previous_response_id": "x"})
        assert (lost.status_code, lost.json()["error"]["param"]) == (404, "previous_response_id")


def test_chat(client: openai.OpenAI, server: Served) -> None:
    """The text of an answer with an image is what the model thought."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()}}
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": "Make the sky green"}]}],
        "seed": 3,
        **FEW,
    }
    with server.client() as http:
        both = _message(http, {**body, "modalities": ["text", "image"], "max_tokens": 12})
        alone = _message(http, {**body, "modalities": ["image"]})
    edit = client.images.edit(model=NAME, image=png(), prompt="Make the sky green", extra_body={**FEW, "seed": 3})
    assert both["content"]
    assert [part["type"] for part in alone["content"]] == ["image_url"]
    assert np.abs(_image(alone) - drawn(edit)).max() <= 1
    assert np.abs(_image(both) - _image(alone)).mean() > 1


def _message(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def _image(message: dict[str, Any]) -> np.ndarray:
    [image] = message["images"]
    return pixels(image["image_url"]["url"].partition(",")[2])


def test_previews_are_streamed(server: Served) -> None:
    body = {"model": NAME, "prompt": LAKE, "size": "64x64", "stream": True, "partial_images": 2, "seed": 1, **FEW}
    with server.client() as http, http.stream("POST", "/v1/images/generations", json=body) as answer:
        events = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert events == [*["image_generation.partial_image"] * 2, "image_generation.completed"]


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"size": "100x64"}, "size", "multiple of 16"),
        ({"size": "512x64"}, "size", "at most 128"),
        ({"negative_prompt": "fog"}, "negative_prompt", "takes no negative_prompt"),
        ({"options": {"cfg_image_scale": 2}}, "options.cfg_image_scale", "cfg_img_scale"),
        ({"options": {"cfg_img_scale": "much"}}, "options.cfg_img_scale", "must be a number"),
    ],
)
def test_refused(server: Served, more: dict[str, Any], param: str, says: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/images/generations", json={"model": NAME, "prompt": LAKE, **FEW, **more})
    assert answer.status_code in (400, 413), answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"] == param


def test_clients_that_leave_leave_nothing(server: Served) -> None:
    """While contexts are lent to an image of many steps."""
    body = {
        "model": NAME,
        "prompt": LAKE,
        "size": "128x128",
        "stream": True,
        "partial_images": 3,
        "num_inference_steps": 150,
        "n": 3,
    }
    with server.client() as http:
        for _ in range(2):
            with http.stream("POST", "/v1/images/generations", json=body) as answer:
                next(line for line in answer.iter_lines() if "partial_image" in line)
    server.until_empty()
