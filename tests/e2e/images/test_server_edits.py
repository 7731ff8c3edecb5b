"""`segue serve` on a model that works on images: forms of the official client, and what the model cannot take."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from server_process import NAME, Served, served, tiny

FEW: dict[str, Any] = {"num_inference_steps": 2, "seed": 5, "true_cfg_scale": 1.0}
ASKED: dict[str, Any] = {"model": NAME, "prompt": "make it green", "size": "64x64"}


def png(turned: int) -> bytes:
    """An image of its own."""
    ramp = np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)
    file = io.BytesIO()
    Image.fromarray(np.rot90(ramp, turned).copy()).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny(tmp_path_factory.mktemp("qwen-image-edit-plus"), "qwen-image-edit-plus")) as server:
        yield server


def edited(client: openai.OpenAI, images: list[bytes]) -> np.ndarray:
    answer = client.images.edit(**ASKED, image=images, extra_body=FEW)
    assert answer.data is not None
    with Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))) as image:
        return np.asarray(image).astype(int)


@pytest.mark.nightly
def test_each_image_counts(client: openai.OpenAI) -> None:
    one, two = edited(client, [png(0)]), edited(client, [png(0), png(1)])
    assert one.shape == (64, 64, 3)
    assert np.abs(edited(client, [png(0)]) - one).max() <= 1
    assert np.abs(edited(client, [png(1)]) - one).mean() > 1
    assert np.abs(two - one).mean() > 1


def test_streamed(client: openai.OpenAI) -> None:
    with client.images.edit(
        **ASKED, image=png(0), stream=True, partial_images=1, extra_body={**FEW, "num_inference_steps": 3}
    ) as stream:
        assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.parametrize(
    ("files", "param", "says"),
    [
        ([("image", png(0)), ("mask", png(1))], "mask", "takes no mask"),
        ([("image", b"no image")], "image", "not a readable image"),
        ([("image[]", png(0)), ("image[]", png(1)[:100])], "image[1]", "not a readable image"),
    ],
)
def test_refused(server: Served, files: list[tuple[str, bytes]], param: str, says: str) -> None:
    with server.client() as http:
        parts = [(name, ("a.png", data)) for name, data in files]
        answer = http.post("/v1/images/edits", data={**ASKED, **FEW}, files=parts)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]
