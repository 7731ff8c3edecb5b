"""Qwen3-Omni over HTTP: replies to every kind of input are the library's, and speech is refused by name."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import ASSETS, served, tiny

from segue.media.parts import messages_from
from segue.media.sources import PYTHON_POLICY
from segue.messages.reference import Question
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen3_omni.reference import Reference, load
from segue.models.shared.reference import Library

TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("qwen3-omni") / "tiny", "qwen3-omni")


@pytest.fixture(scope="module")
def http(checkpoint: Path) -> Iterator[httpx.Client]:
    with served(checkpoint, "--log-level", "warning") as server, server.client() as http:
        yield http


@pytest.fixture(scope="module")
def library(checkpoint: Path) -> Reference:
    return load(Library(checkpoint, "cpu", torch.float32))


def _url(name: str, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode((ASSETS / name).read_bytes()).decode()}"


PARTS: dict[str, dict[str, Any]] = {
    "image": {"type": "image_url", "image_url": {"url": _url("photo.jpg", "image/jpeg")}},
    "audio": {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode((ASSETS / "speech.wav").read_bytes()).decode(), "format": "wav"},
    },
    "video": {"type": "video_url", "video_url": {"url": _url("video.mp4", "video/mp4")}},
}


@pytest.mark.parametrize(("kinds", "with_audio"), [((), False), (("image", "audio"), False), (("video",), True)])
def test_replies_are_the_librarys(
    http: httpx.Client, library: Reference, kinds: tuple[str, ...], with_audio: bool
) -> None:
    text = {"type": "text", "text": "What is this?"}
    options = {"use_audio_in_video": with_audio}
    answer = http.post(
        "/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": [*(PARTS[kind] for kind in kinds), text]}],
            "modalities": ["text"],
            "temperature": 0,
            "max_tokens": TOKENS,
            "return_token_ids": True,
            "options": options,
        },
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    reply = body["choices"][0]["token_ids"]
    files = {"image": "photo.jpg", "audio": "speech.wav", "video": "video.mp4"}
    asked = messages_from(
        [{"role": "user", "content": [*({"type": kind, kind: ASSETS / files[kind]} for kind in kinds), text]}],
        PYTHON_POLICY,
    )
    sampling = {"thinker": SamplingParams(temperature=0.0, max_tokens=TOKENS)}
    request = Request(request_id="r", messages=asked, options=options, sampling=sampling)
    truth = library.answer(Question(index=0, request=request, token_ids={"thinker": reply}))
    assert body["usage"]["prompt_tokens"] == len(truth.prompt_token_ids)
    assert truth.followed[0].best == reply


def test_speech_is_refused_by_name(http: httpx.Client) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "modalities": ["text", "audio"]}
    answer = http.post("/v1/chat/completions", json={**asked, "audio": {"voice": "Ethan", "format": "wav"}})
    assert answer.status_code == 400
    assert "audio" in answer.json()["error"]["message"]
