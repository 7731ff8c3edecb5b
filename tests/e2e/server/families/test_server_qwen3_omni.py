"""Qwen3-Omni over HTTP: replies to every kind of input, and their speech, are the library's."""

from __future__ import annotations

import base64
import io
import os
import signal
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from server_process import ASSETS, Metrics, Served, served, tiny

from segue.media.parts import messages_from
from segue.media.sources import PYTHON_POLICY
from segue.messages.reference import Question
from segue.messages.request import Message, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen3_omni.reference import Reference, load
from segue.models.shared.omni.say import asking
from segue.models.shared.reference import Follow, Library, processors

TOKENS = 16
CODES = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("qwen3-omni") / "tiny", "qwen3-omni")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint, "--log-level", "warning") as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


@pytest.fixture(scope="module")
def library(checkpoint: Path) -> Reference:
    return load(Library(checkpoint, "cpu", torch.float32))


def _url(name: str, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode((ASSETS / name).read_bytes()).decode()}"


def samples_of(data: str) -> np.ndarray:
    """The samples of a WAV file in base64."""
    with wave.open(io.BytesIO(base64.b64decode(data))) as file:
        assert file.getframerate() == 24000
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768


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


def test_speech_is_the_librarys(http: httpx.Client, library: Reference) -> None:
    """Of an image and a question: the waveform of one call over the codes that the library gives."""
    text = {"type": "text", "text": "What is this?"}
    sampling = {
        "thinker": {"temperature": 0, "max_tokens": TOKENS},
        "talker": {"temperature": 0, "max_tokens": CODES},
    }
    answer = http.post(
        "/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": [PARTS["image"], text]}],
            "modalities": ["text", "audio"],
            "audio": {"voice": "Aiden", "format": "wav"},
            "sampling": sampling,
            "return_token_ids": True,
        },
    )
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    samples = samples_of(choice["message"]["audio"]["data"])
    content = [{"type": "image", "image": ASSETS / "photo.jpg"}, text]
    [message] = messages_from([{"role": "user", "content": content}], PYTHON_POLICY)
    reply, expected = library.spoken(message.content, voice="Aiden", tokens=TOKENS, codes=CODES)
    assert choice["token_ids"] == reply
    assert len(samples) == len(expected)
    assert 0.02 < float(np.sqrt(np.mean(np.square(expected)))) < 0.5
    assert float(np.abs(expected - samples).max()) < 2e-4


def test_token_ids_with_media_beside_them_say_the_same(http: httpx.Client) -> None:
    """The ids of a chat's prompt, in which the media are expanded, and the same with one placeholder for each."""
    kinds, text = ("video", "image", "audio"), {"type": "text", "text": "What is this?"}
    asked = {
        "model": "tiny",
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "sampling": {
            "thinker": {"temperature": 0, "max_tokens": TOKENS},
            "talker": {"temperature": 0, "max_tokens": CODES},
        },
        "return_token_ids": True,
    }
    messages = [{"role": "user", "content": [*(PARTS[kind] for kind in kinds), text]}]
    chat = http.post("/v1/chat/completions", json={**asked, "messages": messages}).json()
    ids = chat["prompt_token_ids"]
    places = [http.post("/tokenize", json={"prompt": f"<|{kind}_pad|>"}).json()["tokens"] for kind in kinds]
    single = [token for token, _ in groupby(ids)]
    assert sum([token] in places for token in single) == len(kinds) < sum([token] in places for token in ids)
    media = {
        "image": _url("photo.jpg", "image/jpeg"),
        "audio": [_url("speech.wav", "audio/wav")],
        "video": _url("video.mp4", "video/mp4"),
    }
    for given in (ids, [token for token, run in groupby(ids) for _ in (run if [token] not in places else [0])]):
        answer = http.post(
            "/v1/chat/completions", json={**asked, "prompt_token_ids": given, "multi_modal_data": media}
        ).json()
        assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
        assert answer["choices"][0]["message"]["audio"]["data"] == chat["choices"][0]["message"]["audio"]["data"]
        assert answer["usage"] == {**chat["usage"], "prompt_tokens_details": answer["usage"]["prompt_tokens_details"]}
    body = {"model": "tiny", "prompt": ids, "temperature": 0, "max_tokens": TOKENS, "return_token_ids": True}
    answer = http.post("/v1/completions", json={**body, "multi_modal_data": media}).json()
    assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    refused = http.post("/v1/completions", json={**body, "multi_modal_data": {"image": media["image"]}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "placeholders for audio, but multi_modal_data has 0 audio" in refused.json()["error"]["message"]


def speak(server: Served, seed: int) -> tuple[list[int], np.ndarray]:
    """(reply, samples) of a sampled answer."""
    with server.client() as http:
        answer = http.post(
            "/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": [PARTS["image"], {"type": "text", "text": "What is this?"}]}],
                "modalities": ["text", "audio"],
                "audio": {"format": "wav"},
                "seed": seed,
                "sampling": {"thinker": {"max_tokens": 30}, "talker": {"max_tokens": 120}},
                "return_token_ids": True,
            },
        )
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["token_ids"], samples_of(choice["message"]["audio"]["data"])


@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
def test_sampled_speech_is_the_same_after_a_kill(server: Served, stage: str) -> None:
    """Every sample of it, but for rounding: draws of all codes of a row depend on the request alone."""
    alone = [speak(server, seed) for seed in range(3)]
    assert len({len(samples) for _, samples in alone}) == 3

    def working(metrics: Metrics) -> bool:
        return sum(metrics["segue_requests"].values()) > 0

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(speak, server, seed) for seed in range(3)]
        server.until(lambda metrics: working(metrics) or all(answer.done() for answer in answers))
        os.kill(server.pid(stage), signal.SIGKILL)
        for answer, (reply, samples) in zip(answers, alone, strict=True):
            again, said = answer.result()
            assert again == reply
            np.testing.assert_allclose(said, samples, rtol=0, atol=2e-4)
    # all may have been said before the kill was noticed
    server.until(lambda _: server.health()["stages"][stage]["replicas"][0]["restarts"] >= 1)


def test_a_given_text_is_said_as_the_library_says_it(http: httpx.Client, library: Reference) -> None:
    """Its thinker is made to write that text."""
    text = "The sea is calm today, and the hills behind it are green."
    asked = {"input": text, "voice": "Aiden", "response_format": "wav"}
    answer = http.post(
        "/v1/audio/speech", json={**asked, "sampling": {"talker": {"temperature": 0, "max_tokens": CODES}}}
    )
    assert answer.status_code == 200, answer.text
    [message] = asking([Message("user", [TextPart(text)])], text, None)
    ids = library.processor.tokenizer(text)["input_ids"]
    made = Follow([*ids, library.model.config.im_end_token_id])
    reply, expected = library.spoken(
        message.content,
        voice="Aiden",
        tokens=len(ids) + 1,
        codes=CODES,
        thinker_logits_processor=processors(made),
    )
    assert reply[:-1] == ids
    assert made.best[:-1] != ids, "it says so by itself"
    samples = np.frombuffer(answer.content[44:], "<i2") / 32768
    assert len(samples) == len(expected)
    assert 0.02 < float(np.sqrt(np.mean(np.square(expected)))) < 0.5
    assert float(np.abs(expected - samples).max()) < 2e-4
