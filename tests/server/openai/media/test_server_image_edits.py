"""POST /v1/images/edits: forms as the official client sends them, and broken ones."""

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
from hypothesis import given
from hypothesis import strategies as st
from painter import painter, pixels
from PIL import Image

from segue.media.encode import encode_image
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart
from segue.server.http.multipart import MAX_PARTS, form_values, parse_multipart
from segue.server.openai.images.request import MAX_MASK_BYTES, EditBody
from segue.server.settings import ServerSettings

URL = "/v1/images/edits"
FILES = [encode_image(pixels(index, 8, 16).tobytes(), 8, 16, "png") for index in range(3)]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    service = painter()
    service.card.takes = frozenset({"text", "image"})
    with live(service, ServerSettings(drain_seconds=1, max_body_bytes=6 << 20)) as server:
        yield server


def sent(server: Live) -> list[MediaPart]:
    """The images of the last request."""
    [message] = server.service.requests[-1].messages
    return [part for part in message.content if isinstance(part, MediaPart)]


def test_one_image(client: openai.OpenAI, server: Live) -> None:
    answer = client.images.edit(
        model="painter", image=FILES[0], prompt="make it green", size="32x48", n=2, extra_body={"seed": 4}
    )
    assert answer.data is not None
    with Image.open(io.BytesIO(base64.b64decode(answer.data[1].b64_json or ""))) as image:
        assert np.array_equal(np.asarray(image), pixels(1, 48, 32))
    request = server.service.requests[-1]
    assert request.prompt == "make it green"
    assert request.seed == 4
    assert request.diffusion is not None
    assert (request.diffusion.width, request.diffusion.num_images_per_prompt) == (32, 2)
    assert sent(server) == [MediaPart("image", FILES[0], field="image")]


def test_several_with_a_mask(client: openai.OpenAI, server: Live) -> None:
    more = {"true_cfg_scale": 2.5, "sigmas": [1.0, 0.5], "progress": False}
    client.images.edit(model="painter", image=FILES[:2], mask=FILES[2], prompt="7", extra_body=more)
    assert [(part.data, part.field, part.role) for part in sent(server)] == [
        (FILES[0], "image[0]", ""),
        (FILES[1], "image[1]", ""),
        (FILES[2], "mask", "mask"),
    ]
    request = server.service.requests[-1]
    assert request.prompt == "7", "text stays text"
    assert request.diffusion is not None
    assert (request.diffusion.true_cfg_scale, request.diffusion.sigmas) == (2.5, [1.0, 0.5])


def test_a_reference_beside_a_mask(http: httpx.Client, server: Live) -> None:
    files = dict(zip(("image_reference", "image", "mask"), FILES, strict=True))
    assert http.post(URL, data={"prompt": "x"}, files=files).status_code == 200
    assert [(part.data, part.field, part.role) for part in sent(server)] == [
        (FILES[1], "image", ""),
        (FILES[2], "mask", "mask"),
        (FILES[0], "image_reference", "image_reference"),
    ]


def test_streamed(client: openai.OpenAI) -> None:
    with client.images.edit(
        model="painter", image=FILES[0], prompt="x", stream=True, partial_images=1, extra_body={"n": 1}
    ) as stream:
        assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


def test_as_json(http: httpx.Client, server: Live) -> None:
    url = "data:image/png;base64," + base64.b64encode(FILES[0]).decode()
    answer = http.post(URL, json={"prompt": "x", "image": [url, url]})
    assert answer.status_code == 200, answer.text
    assert [part.data for part in sent(server)] == [FILES[0], FILES[0]]
    # as OpenAI's JSON has it
    answer = http.post(URL, json={"prompt": "x", "images": [{"image_url": url}], "mask": {"image_url": url}})
    assert answer.status_code == 200, answer.text
    assert [(part.data, part.role) for part in sent(server)] == [(FILES[0], ""), (FILES[0], "mask")]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"images": [{"file_id": "file-1"}]}, "image[0]", "image_url"),
        ({"images": [{"image_url": 5}]}, "image[0]", "file or a URL"),
        ({"images": "data:,x"}, "images", "list"),
        ({"images": []}, "image", "empty"),
        ({"images": ["data:,x"], "image": "data:,x"}, "images", "give one"),
    ],
)
def test_refused_as_json(http: httpx.Client, fields: dict[str, Any], param: str, says: str) -> None:
    answer = http.post(URL, json={"prompt": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


@pytest.mark.parametrize(
    ("data", "files", "param", "says"),
    [
        ({}, {"image": FILES[0]}, "prompt", "missing"),
        ({"prompt": "x"}, {"mask": FILES[0]}, "mask", "mask is given without image"),
        ({"prompt": "x"}, {"image": FILES[0], "mask": b"GIF89a"}, "mask", "not a PNG"),
        ({"prompt": "x"}, {"image": FILES[0], "mask": FILES[0] + bytes(MAX_MASK_BYTES)}, "mask", "less than"),
        ({"prompt": "x", "n": "two"}, {"image": FILES[0]}, "n", "int"),
        ({"prompt": "x", "size": "65x64"}, {"image": FILES[0]}, "size", "64 or 80"),
        ({"prompt": "x", "image": "/etc/passwd"}, {"other": b"x"}, "other", "file"),
        ({"prompt": "x", "image": "/etc/passwd"}, {"mask": b"x"}, "image", ""),
        ({"prompt": "x"}, {"image": b""}, "image", "empty"),
        ({"prompt": "x"}, {"image": FILES[0], "prompt": b"y"}, "prompt", "file"),
        ({"prompt": "x", "input_fidelity": "high"}, {"image": FILES[0]}, "input_fidelity", "low"),
    ],
)
def test_refused(http: httpx.Client, data: dict[str, Any], files: dict[str, bytes], param: str, says: str) -> None:
    answer = http.post(URL, data=data, files={name: (name, file) for name, file in files.items()})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


def test_too_much(http: httpx.Client) -> None:
    files = [("image[]", ("a.png", FILES[0]))] * 17
    many = http.post(URL, data={"prompt": "x"}, files=files)
    assert (many.status_code, many.json()["error"]["param"]) == (413, "image")
    large = http.post(URL, data={"prompt": "x"}, files={"image": ("a.png", bytes(6 << 20))})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")


def test_a_model_that_takes_no_images() -> None:
    with live(painter()) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        answer = http.post(URL, data={"prompt": "x"}, files={"image": ("a.png", FILES[0])})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert "takes no images" in answer.json()["error"]["message"]


def test_forms_of_other_sites_are_not_taken(http: httpx.Client, server: Live) -> None:
    form: dict[str, Any] = {"data": {"prompt": "x"}, "files": {"image": ("a.png", FILES[0])}}
    other = http.post(URL, headers={"Origin": "http://evil.example"}, **form)
    assert (other.status_code, other.json()["error"]["code"]) == (403, "cross_site")
    assert not server.service.requests
    assert http.post(URL, headers={"Origin": server.url}, **form).status_code == 200


def test_forms_of_a_site_that_is_let_in() -> None:
    service = painter()
    service.card.takes = frozenset({"text", "image"})
    with live(service, ServerSettings(allow_origins=frozenset({"http://app.example"}))) as server:
        form: dict[str, Any] = {"data": {"prompt": "x"}, "files": {"image": ("a.png", FILES[0])}}
        with httpx.Client(base_url=server.url, timeout=120) as http:
            assert http.post(URL, headers={"Origin": "http://app.example"}, **form).status_code == 200
            assert http.post(URL, headers={"Origin": "http://evil.example"}, **form).status_code == 403


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b--",
        b"nothing of the kind",
        b"--b\r\n\r\nx\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx',
        b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n--b--',
        b'--b\r\nContent-Disposition: attachment; name="prompt"\r\n\r\nx\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="pro[mp]t[]"\r\n\r\nx\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\xff\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="prompt"' + b" " * 20000 + b"\r\n\r\nx\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\n1\r\n' * (MAX_PARTS + 1) + b"--b--",
    ],
)
def test_broken_forms(http: httpx.Client, body: bytes) -> None:
    answer = http.post(URL, content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_no_boundary(http: httpx.Client) -> None:
    answer = http.post(URL, content=b"x", headers={"Content-Type": "multipart/form-data"})
    assert (answer.status_code, "boundary" in answer.json()["error"]["message"]) == (400, True)


def written(parts: list[tuple[str, bytes]], boundary: bytes) -> bytes:
    pieces = [
        b"--" + boundary + b'\r\nContent-Disposition: form-data; name="' + name.encode() + b'"; filename="f"\r\n\r\n'
        + data + b"\r\n"
        for name, data in parts
    ]  # fmt: skip
    return b"".join(pieces) + b"--" + boundary + b"--\r\n"


@given(st.lists(st.tuples(st.sampled_from(["image", "mask"]), st.binary(max_size=40))))
def test_files_come_as_they_were_sent(parts: list[tuple[str, bytes]]) -> None:
    """Whatever bytes they have, line breaks and dashes among them."""
    read = parse_multipart(written(parts, b"a1b2c3d4e5f6"), 'multipart/form-data; boundary="a1b2c3d4e5f6"')
    assert [(part.name, part.data, part.is_file) for part in read] == [(name, data, True) for name, data in parts]


@given(st.binary(max_size=200))
def test_anything_at_all(body: bytes) -> None:
    """A form, or an error of ours."""
    try:
        form_values(parse_multipart(b"--b" + body, "multipart/form-data; boundary=b"), EditBody, frozenset())
    except InvalidRequest:
        return
    assert body.startswith(b"--") or b"\r\n--b" in body
