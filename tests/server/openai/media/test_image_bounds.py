"""What no file can hold is refused before it is made; what is wrong with a body is said as it is."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import Live, live
from filmer import filmer
from painter import painter
from PIL import Image

from segue.media.write_video import check_video_encoder
from segue.messages.diffusion import diffusion_from
from segue.messages.errors import ConfigError, InvalidRequest
from segue.server.settings import ServerSettings

MAKE, EDIT, FILM = "/v1/images/generations", "/v1/images/edits", "/v1/videos"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    service = painter()
    service.card.takes = frozenset({"text", "image"})
    with live(service) as server:
        yield server


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:300]
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("kind", "most"), [("webp", 16_383), ("jpeg", 65_500)])
@pytest.mark.parametrize("asked", ["size", "width", "height"])
def test_sides_that_a_file_has_not(http: httpx.Client, server: Live, kind: str, most: int, asked: str) -> None:
    long = (most // 16 + 1) * 16
    by_name: dict[str, dict[str, Any]] = {
        "size": {"size": f"{long}x16"},
        "width": {"width": long, "height": 16},
        "height": {"height": long},
    }
    for stream in (False, True):
        body = {"prompt": "a wall", "output_format": kind, "stream": stream, **by_name[asked]}
        error = error_of(http.post(MAKE, json=body), 413)
        assert error["param"] == "output_format"
        assert f"at most {most}" in error["message"]
    assert not server.service.requests, "nothing was made of it"


@pytest.mark.parametrize("kind", ["webp", "jpeg", "png"])
def test_the_longest_sides(http: httpx.Client, kind: str) -> None:
    longest = {"webp": 16_368, "jpeg": 65_488, "png": 65_536}[kind]
    answer = http.post(MAKE, json={"prompt": "a wall", "output_format": kind, "size": f"{longest}x16"})
    assert answer.status_code == 200, answer.text[:300]
    with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
        assert image.size == (longest, 16)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"image": {}}, "image", "image has nothing in it"),
        ({"image": [{}]}, "image[0]", "image[0] has nothing in it"),
        ({"image": "data:,a", "mask": ["data:,a", "data:,b"]}, "mask", "mask is a list of 2; it must be one"),
    ],
)
def test_images_that_are_none(http: httpx.Client, fields: dict[str, Any], param: str, says: str) -> None:
    error = error_of(http.post(EDIT, json={"prompt": "green", **fields}), 400)
    assert error["param"] == param
    assert says in error["message"]


def test_two_masks_of_a_form(http: httpx.Client) -> None:
    """Their bytes are not in the message."""
    files = [(name, ("a.png", b"\x89PNG\r\n\x1a\n")) for name in ("image", "mask", "mask")]
    message = error_of(http.post(EDIT, data={"prompt": "green"}, files=files), 400)["message"]
    assert message == "mask is a list of 2; it must be one file or URL"


def test_what_a_body_may_be_is_said(http: httpx.Client) -> None:
    for url, right in ((MAKE, "application/json"), (EDIT, "application/json or multipart/form-data")):
        error = error_of(http.post(url, data={"prompt": "x"}), 415)
        assert error["message"].endswith(f"it must be {right}")


def test_a_compressed_body(http: httpx.Client) -> None:
    """It is refused as what it is, JSON and form alike."""
    body = gzip.compress(json.dumps({"prompt": "x"}).encode())
    for url, kind in ((MAKE, "application/json"), (EDIT, "multipart/form-data; boundary=B")):
        answer = http.post(url, content=body, headers={"Content-Type": kind, "Content-Encoding": "gzip"})
        assert "Content-Encoding is 'gzip'" in error_of(answer, 415)["message"]
    plain = http.post(MAKE, json={"prompt": "x", "size": "32x32"}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize(
    ("sigmas", "right"),
    [([1e-300, 0.0], False), ([0.50000001, 0.5], False), ([1e-45, 0.0], True), ([0.5000001, 0.5], True)],
)
def test_noise_levels_in_32_bits(sigmas: list[float], right: bool) -> None:
    """What is equal, or nothing, as schedulers have it does not fall."""
    if right:
        assert diffusion_from({"sigmas": sigmas}).sigmas == sigmas
    else:
        with pytest.raises(InvalidRequest, match="falls"):
            diffusion_from({"sigmas": sigmas})


def test_sides_that_a_video_has_not(tmp_path: Path) -> None:
    """Refused before there is a job; of the longest, the thumbnail is smaller, as WebP holds one pixel less."""
    settings = ServerSettings(drain_seconds=1, video_dir=tmp_path)
    with live(filmer(), settings) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        for asked, param in (({"size": "16400x16"}, "size"), ({"height": 16_400, "width": 16}, "height")):
            error = error_of(http.post(FILM, json={"prompt": "a wall", **asked}), 413)
            assert error["param"] == param
            assert "at most 16384" in error["message"]
        assert http.get(FILM).json()["data"] == []
        video = http.post(FILM, json={"prompt": "a wall", "size": "16384x16", "num_frames": 6}).json()
        while video["status"] in ("queued", "in_progress"):
            video = http.get(f"{FILM}/{video['id']}").json()
        assert (video["status"], video["error"]) == ("completed", None)
        thumbnail = http.get(f"{FILM}/{video['id']}/content", params={"variant": "thumbnail"})
        with Image.open(io.BytesIO(thumbnail.content)) as image:
            assert image.width == 16_383


def test_an_encoder_that_is_not_there() -> None:
    check_video_encoder()
    with pytest.raises(ConfigError, match="no encoder 'libx264rgbx'"):
        check_video_encoder("libx264rgbx")
