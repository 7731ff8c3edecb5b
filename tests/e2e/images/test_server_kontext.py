"""`segue serve` on Kontext: an image edited as a whole, and where a mask opens it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from server_process import NAME, Served, pixels, served, tiny

ASKED: dict[str, Any] = {"model": NAME, "prompt": "make it green"}
FEW: dict[str, Any] = {"num_inference_steps": 3, "seed": 5, "max_sequence_length": 32}


def png(turned: int = 0, alpha: tuple[int, int] | None = None) -> bytes:
    """64 high, 96 wide. `alpha`: (width, height) of a mask that opens the left half."""
    ramp = np.linspace(0, 255, 64 * 96 * 3).astype(np.uint8).reshape(64, 96, 3)
    image = Image.fromarray(np.rot90(ramp, turned).copy())
    if alpha is not None:
        image = image.resize(alpha)
        opens = Image.new("L", alpha, 255)
        opens.paste(0, (0, 0, alpha[0] // 2, alpha[1]))
        image.putalpha(opens)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("kontext")
    tiny(directory / "model", "flux-kontext")
    small = directory / "deployment.yaml"  # images are seen as they are, so that this takes seconds
    small.write_text("stages: {input: {options: {auto_resize: false}}}\n")
    with served(directory / "model", "--config", str(small)) as server:
        yield server


@pytest.mark.nightly
def test_a_mask_keeps_the_rest(client: openai.OpenAI) -> None:
    """The two prompts differ where the mask opens the image, and only there, but for the VAE."""
    made = []
    for prompt in ("a small boat", "a house by the sea"):
        answer = client.images.edit(
            model=NAME, prompt=prompt, image=png(), mask=png(alpha=(96, 64)), size="96x64", extra_body=FEW
        )
        assert answer.data is not None
        made.append(pixels(answer.data[0].b64_json))
        assert made[-1].shape == (64, 96, 3)
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.image_tokens == 24
    apart = np.abs(made[0] - made[1])
    assert apart[:, :32].mean() > 4 * apart[:, 72:].mean()
    assert apart[:, :32].mean() > 2


@pytest.mark.nightly  # test_server_edits
def test_a_reference(server: Served) -> None:
    with server.client() as http:
        made = [
            _edited(http, {"image": png(), "mask": png(alpha=(96, 64)), **more})
            for more in ({}, {"image_reference": png(1)}, {"image_reference": png(2)})
        ]
    assert np.abs(made[1] - made[0]).mean() > 1
    assert np.abs(made[2] - made[1]).mean() > 1


def _edited(http: httpx.Client, files: dict[str, bytes]) -> np.ndarray:
    answer = http.post("/v1/images/edits", data={**ASKED, **FEW}, files=files)
    assert answer.status_code == 200, answer.text
    return pixels(answer.json()["data"][0]["b64_json"])


@pytest.mark.parametrize(
    ("files", "more", "param", "says"),
    [
        ({"mask": png(alpha=(64, 64))}, {}, "mask", "64 x 64 pixels; it must be as large as the image, 96 x 64"),
        ({"mask": png(alpha=(96, 64))}, {"size": "64x64"}, "size", "96 x 64: leave the size out"),
        ({"image_reference": png(1)}, {}, "image_reference", "no mask"),
        ({}, {"strength": 0.5}, "strength", "goes with a mask"),
    ],
)
def test_refused(server: Served, files: dict[str, bytes], more: dict[str, Any], param: str, says: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/images/edits", data={**ASKED, **FEW, **more}, files={"image": png(), **files})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]
