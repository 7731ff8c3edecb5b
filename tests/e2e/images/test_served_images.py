"""`segue serve` on a model that makes images: what the official client gets is what the model makes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image, ImageOps
from server_process import NAME, Served, pixels, served
from transformers import AutoTokenizer

from segue.models.images.qwen_image.input import DROP, TEMPLATE

ASKED: dict[str, Any] = {"model": NAME, "prompt": "a small boat left the harbour", "size": "64x96"}
ORIENTATION = 0x0112
"""Of a camera; 6: turned to its right."""
FEW: dict[str, Any] = {"num_inference_steps": 3, "seed": 5}

HELD = ("segue_requests", "segue_generations_in_flight", "segue_stage_requests", "segue_stage_retained_bytes")


@pytest.fixture(scope="module")
def server(qwen_image_dir: Path) -> Iterator[Served]:
    with served(qwen_image_dir) as server:
        yield server


def test_images_whole_and_streamed(client: openai.OpenAI) -> None:
    """The same seed gives the same image, another one another; the streamed one is the whole one."""
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


@pytest.mark.parametrize("form", ["png", "webp", "jpeg"])
def test_the_files_are_the_same_after_a_kill(server: Served, client: openai.OpenAI, form: Any) -> None:
    """kill -9 of the output stage, when the client has its preview. One preview: two are decoded in one call or in two,
    depending on time, and sums of a larger batch may differ in the last bit."""
    events: list[list[Any]] = [[] for _ in range(3)]
    for taken in events:
        asked = {**ASKED, "output_format": form}
        with client.images.generate(**asked, stream=True, partial_images=1, extra_body=FEW) as stream:
            for event in stream:
                taken.append((event.type, event.b64_json))
                if taken is events[-1] and len(taken) == 1:
                    os.kill(server.pid("output"), signal.SIGKILL)
    # of the first request two calls of the network run unrecorded, and their sums may differ in the last bit
    assert events[1] == events[2]
    assert [kind.rpartition(".")[2] for kind, _ in events[2]] == ["partial_image", "completed"]


def png(mode: str, height: int = 96, width: int = 64, transparent: int = 32) -> bytes:
    """An image; with an alpha channel, one whose first `transparent` columns are fully transparent."""
    ramp = np.linspace(0, 255, height * width * 3).astype(np.uint8).reshape(height, width, 3)
    image = Image.fromarray(ramp)
    if mode == "RGBA":
        alpha = np.full((height, width), 255, dtype=np.uint8)
        alpha[:, :transparent] = 0
        image.putalpha(Image.fromarray(alpha))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_a_mask_keeps_the_rest(client: openai.OpenAI) -> None:
    """What is transparent is made anew, by the prompt; the rest stays what it was, but for the VAE."""
    made = []
    for prompt in ("a small boat", "a house by the sea"):
        answer = client.images.edit(
            **{**ASKED, "prompt": prompt}, image=png("RGB"), mask=png("RGBA"), extra_body={**FEW, "strength": 0.9}
        )
        assert answer.data is not None
        made.append(pixels(answer.data[0].b64_json))
    apart = np.abs(made[0] - made[1])
    assert apart[:, :24].mean() > 10 * apart[:, 48:].mean()
    assert apart[:, :24].mean() > 2


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (png("RGBA", 64, 64), "must be as large as the image, 64 x 96"),
        (png("RGB"), "no alpha channel"),
        (png("RGBA", transparent=0), "nowhere fully transparent"),
        (png("RGBA")[:200], "not a readable image"),
        (b"GIF89a", "not a PNG"),
        (b"", "empty"),
    ],
)
def test_masks_that_are_none(server: Served, mask: bytes, says: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/images/edits", data={**ASKED, **FEW}, files={"image": png("RGB"), "mask": mask})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "mask"), error
    assert says in error["message"]


def unusual(kind: str) -> tuple[bytes, bytes]:
    """A file that is no plain PNG, and the PNG of what it shows."""
    file, plain = io.BytesIO(), io.BytesIO()
    ramp = np.linspace(0, 255, 64 * 96 * 3).astype(np.uint8).reshape(64, 96, 3)
    image = Image.fromarray(ramp)
    match kind:
        case "animation":
            image = image.convert("P")
            image.save(file, "GIF", save_all=True, append_images=[Image.new("P", (96, 64), 7)])
        case "16 bits":
            image = Image.fromarray(ramp[:, :, 0])
            Image.fromarray(ramp[:, :, 0].astype(np.uint16) * 257).save(file, "PNG")
        case "CMYK":
            image = image.convert("CMYK")
            image.save(file, "JPEG", quality=100, subsampling=0)
            image = Image.open(file)
        case "turned camera":
            exif = Image.Exif()
            exif[ORIENTATION] = 6
            image.save(file, "JPEG", exif=exif)
            image = ImageOps.exif_transpose(Image.open(file))
        case "alpha":
            image.putalpha(Image.linear_gradient("L").resize(image.size))
            image.save(file, "WEBP", lossless=True, exact=True)
    image.convert("RGB").save(plain, "PNG")
    return file.getvalue(), plain.getvalue()


@pytest.mark.parametrize("kind", ["animation", "16 bits", "CMYK", "turned camera", "alpha"])
def test_files_that_are_no_plain_images(client: openai.OpenAI, kind: str) -> None:
    """The first frame, in 8 bits, in RGB, upright, without transparency: and written as a JPEG."""
    made = []
    for file in unusual(kind):
        answer = client.images.edit(
            **ASKED, image=file, output_format="jpeg", extra_body={**FEW, "strength": 0.5, "true_cfg_scale": 1.0}
        )
        assert answer.data is not None
        made.append(pixels(answer.data[0].b64_json))
    assert made[0].shape == (96, 64, 3)
    assert np.abs(made[0] - made[1]).max() <= 2


def test_a_crowd_of_many_sizes(server: Served) -> None:
    """Forty at once: each gets its own size, and what it would get alone."""
    sizes, steps = ("64x64", "96x64", "32x128", "64x96", "128x32"), (2, 3, 5)
    asked = [
        {
            "prompt": f"house {index}",
            "size": sizes[index % len(sizes)],
            "num_inference_steps": steps[index % len(steps)],
            "seed": index,
            "true_cfg_scale": 1.0,
        }
        for index in range(40)
    ]
    with server.client() as http, ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda body: http.post("/v1/images/generations", json=body), asked))
        assert {answer.status_code for answer in answers} == {200}
        made = [pixels(answer.json()["data"][0]["b64_json"]) for answer in answers]
        for body, image in zip(asked, made, strict=True):
            assert f"{image.shape[1]}x{image.shape[0]}" == body["size"]
        for index in (0, 7, 39):
            alone = http.post("/v1/images/generations", json=asked[index]).json()["data"][0]["b64_json"]
            assert np.abs(pixels(alone) - made[index]).max() <= 1


def test_usage(server: Served, client: openai.OpenAI) -> None:
    """What the text encoder reads of the prompt without its template's head; 16 by 16 pixels are a token."""
    tokenizer = AutoTokenizer.from_pretrained(server.model / "tokenizer")
    text = len(tokenizer(TEMPLATE.format(ASKED["prompt"])).input_ids) - DROP
    whole = client.images.generate(**ASKED, n=2, extra_body={**FEW, "negative_prompt": "not counted"})
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (text, 2 * 4 * 6)
    assert whole.usage.total_tokens == text + 48
    details = whole.usage.input_tokens_details
    assert (details.text_tokens, details.image_tokens) == (text, 0)
    edited = client.images.edit(**ASKED, image=png("RGB"), mask=png("RGBA"), extra_body=FEW)
    assert edited.usage is not None
    details = edited.usage.input_tokens_details
    assert (details.text_tokens, details.image_tokens, edited.usage.output_tokens) == (text, 24, 24)
    with client.images.generate(**ASKED, stream=True, partial_images=1, extra_body=FEW) as stream:
        [*_, done] = stream
    assert done.type == "image_generation.completed"
    assert (done.usage.input_tokens, done.usage.output_tokens) == (text, 24)


def test_arguments_of_pipelines_that_are_served_whole(server: Served) -> None:
    with server.client() as http:
        answer = http.post("/v1/images/generations", json={**ASKED, **FEW, "pipeline_arguments": {"eta": 0.5}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pipeline_arguments.eta")


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


def test_an_edit_of_what_is_no_image(server: Served) -> None:
    with server.client() as http:
        answer = http.post("/v1/images/edits", data={"prompt": "x"}, files={"image": ("a.png", b"x")})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "image")


def test_in_a_chat(client: openai.OpenAI) -> None:
    """The image that the same words give as a prompt."""
    prompt = [{"role": "user", "content": ASKED["prompt"]}]
    chat = client.chat.completions.create(model=NAME, messages=prompt, extra_body={**FEW, "width": 64, "height": 96})
    [image] = chat.choices[0].message.model_dump(warnings=False)["images"]
    alone = client.images.generate(**ASKED, extra_body=FEW)
    assert alone.data is not None
    shown = pixels(image["image_url"]["url"].partition(",")[2])
    assert np.abs(shown - pixels(alone.data[0].b64_json)).max() <= 1


def test_who_leaves_frees_every_stage(server: Served) -> None:
    asked = {**ASKED, "num_inference_steps": 200, "size": "256x256", "stream": True, "progress": True}
    url = "/v1/images/generations"
    with server.nobody_finishes(HELD), server.client() as http, http.stream("POST", url, json=asked) as answer:
        assert next(answer.iter_lines()) == "event: image_generation.progress"
