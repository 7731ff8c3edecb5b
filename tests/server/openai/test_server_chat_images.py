"""Images in chat completions, of a model that makes them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_service import Live, live
from painter import painter, pixels
from PIL import Image

from segue.messages.diffusion import DiffusionParams

ASKED: dict[str, Any] = {"model": "painter", "messages": [{"role": "user", "content": "a red bicycle"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(painter()) as server:
        yield server


def shown(part: dict[str, Any]) -> np.ndarray:
    assert part["type"] == "image_url"
    kind, _, data = part["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image)


def test_whole(client: openai.OpenAI, server: Live) -> None:
    more = {"num_images_per_prompt": 2, "height": 32, "width": 48, "negative_prompt": "grey", "modalities": ["image"]}
    answer = client.chat.completions.create(**ASKED, seed=3, extra_body=more)
    message = answer.choices[0].message
    images: Any = (message.model_extra or {})["images"]
    assert message.content == images, "where vllm-omni's clients read them"
    assert [index for index, image in enumerate(images) if np.array_equal(shown(image), pixels(index, 32, 48))] == [
        0,
        1,
    ]
    request = server.service.requests[-1]
    assert request.modalities == ["image"]
    assert request.diffusion == DiffusionParams(num_images_per_prompt=2, height=32, width=48, negative_prompt="grey")
    assert request.seed == 3


def test_streamed_and_several_choices(client: openai.OpenAI) -> None:
    found: dict[int, list[np.ndarray]] = {0: [], 1: []}
    with client.chat.completions.create(**ASKED, n=2, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                found[choice.index] += [shown(image) for image in choice.delta.model_dump().get("images") or []]
    for images in found.values():
        assert len(images) == 1
        assert np.array_equal(images[0], pixels(0, 64, 96))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"width": 65}, "width", "64 or 80"),
        ({"width": "wide"}, "width", "int"),
        ({"partial_images": 2}, "partial_images", "/v1/images/generations"),
        ({"temperature": 0}, "temperature", "no stage that makes text"),
        ({"modalities": ["text"]}, "modalities[0]", "image"),
    ],
)
def test_refused(server: Live, fields: dict[str, Any], param: str, says: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**ASKED, **fields}, timeout=120)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"n": 2, "use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_is_of_texts_is_refused_by_the_name_it_was_sent_under(
    server: Live, fields: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**ASKED, **fields}, timeout=120)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param in error["message"]
