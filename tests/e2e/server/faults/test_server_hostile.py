"""Whatever a client sends: OpenAI's error object that names field and cause, and nobody else notices."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from server_process import ASSETS, HELLO, NAME, Served, body, ids_of

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(plain_server: Served) -> Served:
    return plain_server


@pytest.fixture(scope="module")
def bystander(server: Served) -> Iterator[None]:
    """Somebody who asks the same all the time, and gets the same answer all the time."""
    answers: list[tuple[int, str]] = []
    stop = threading.Event()

    def ask() -> None:
        with server.client() as http:
            while not stop.is_set():
                answer = http.post(CHAT, json=body(return_token_ids=True))
                answers.append((answer.status_code, json.dumps(answer.json().get("choices"))))

    thread = threading.Thread(target=ask)
    pids = {process.pid for process in server.family()}
    thread.start()
    yield
    stop.set()
    thread.join()
    assert {status for status, _ in answers} == {200}
    assert len({choices for _, choices in answers}) == 1
    assert {process.pid for process in server.family()} == pids, "a worker has died"


@pytest.fixture(scope="module")
def http(server: Served, bystander: None) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def make_image(data: bytes) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def audio(data: bytes) -> list[dict[str, Any]]:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    return [{"role": "user", "content": [part]}]


def video(data: bytes) -> list[dict[str, Any]]:
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    return [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


PHOTO = (ASSETS / "photo.jpg").read_bytes()
SPEECH = (ASSETS / "speech.wav").read_bytes()
VIDEO = (ASSETS / "video.mp4").read_bytes()
FIRST = "messages[0].content[0]"

BAD: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "a priority among equals": ({"priority": -1}, 400, "priority", "scheduling: priority"),
    # media
    "image of garbage": ({"messages": make_image(b"nonsense")}, 400, FIRST, "not a readable image"),
    "half an image": ({"messages": make_image(PHOTO[: len(PHOTO) // 2])}, 400, FIRST, "truncated"),
    "no image": ({"messages": make_image(b"")}, 400, f"{FIRST}.image_url.url", "empty"),
    "sound for an image": ({"messages": make_image(SPEECH)}, 400, FIRST, "not a readable image"),
    "image of 5000 to 1": ({"messages": make_image(png(5000, 1))}, 400, FIRST, "too narrow"),
    "image bomb": ({"messages": make_image(png(20_000, 20_000, "1"))}, 413, FIRST, "max_image_pixels"),
    "audio of garbage": ({"messages": audio(b"RIFFxxxx")}, 400, FIRST, "not a readable audio"),
    "audio header alone": ({"messages": audio(SPEECH[:44])}, 400, FIRST, "no samples"),
    "audio of 10 ms": ({"messages": audio(SPEECH[:1000])}, 400, FIRST, "too short"),
    "an image for audio": ({"messages": audio(PHOTO)}, 400, FIRST, "not a readable audio"),
    "video of garbage": ({"messages": video(b"junk")}, 400, FIRST, "not a readable video"),
    "cut-off video": ({"messages": video(VIDEO[:3000])}, 400, FIRST, "video"),
    "sound for a video": ({"messages": video(SPEECH)}, 400, FIRST, "no video track"),
    # prompts
    "over-long text": ({"messages": says("long " * 20_000)}, 400, "messages", "the context is 32768 tokens"),
    "10,000 messages": (
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(10_000)]},
        400,
        "messages",
        "messages has 10000 entries; at most 4096 are taken",
    ),
    "no messages": ({"messages": []}, 400, "messages", "at least one"),
    "null content": ({"messages": says(None)}, 400, "messages[0].content", "None"),  # type: ignore[arg-type]
    "unknown role": ({"messages": [{"role": "boss", "content": "x"}]}, 400, "messages[0].role", "'boss'"),
    "placeholder in the text": ({"messages": says("see <|IMAGE|>")}, 400, FIRST, "send a part of that kind"),
    "too many ids": ({"messages": None, "prompt_token_ids": [1] * 40_000}, 400, "prompt_token_ids", "40000 tokens"),
    "id outside": ({"messages": None, "prompt_token_ids": [1, 99999]}, 400, "prompt_token_ids[1]", "from 0 to 671"),
    # sampling
    "bias outside": ({"logit_bias": {"99999": 1}}, 400, "logit_bias", "from 0 to 671"),
    "stop id outside": ({"stop_token_ids": [672]}, 400, "stop_token_ids", "from 0 to 671"),
    "suppressed id outside": ({"suppress_tokens": [-1]}, 400, "suppress_tokens", "-1"),
    "nothing left": ({"suppress_tokens": list(range(672))}, 400, "suppress_tokens", "no token to choose"),
    "nothing left at first": (
        {"suppress_tokens": list(range(1, 672)), "stop_token_ids": [0], "min_tokens": 2},
        400,
        "stop_token_ids",
        "no token to choose until min_tokens (2)",
    ),
    "talker's bias outside": (
        {"sampling": {"talker": {"logit_bias": {"99999": 1}}}},
        400,
        "sampling.talker.logit_bias",
        "99999",
    ),
    "endless": ({"max_tokens": 10**30}, 400, "max_tokens", "from 1 to 2147483647"),
    "negative": ({"max_tokens": -1}, 400, "max_tokens", "-1"),
    "hot": ({"temperature": 2.1}, 400, "temperature", "from 0 to 2"),
    "misspelt": ({"temprature": 1}, 400, "temprature", "did you mean 'temperature'?"),
    "misspelt option": ({"options": {"use_audio": True}}, 400, "options.use_audio", "use_audio_in_video"),
    "option of the wrong type": (
        {"options": {"use_audio_in_video": [[[[]]]]}},
        400,
        "options.use_audio_in_video",
        "true or false",
    ),
    "modality": ({"modalities": ["smell"]}, 400, "modalities[0]", "audio, text"),
    "voice": (
        {"modalities": ["text", "audio"], "audio": {"voice": "Chelsy", "format": "wav"}},
        404,
        "audio.voice",
        "did you mean 'Chelsie'?",
    ),
    "model": ({"model": "tinyy"}, 404, "model", "did you mean 'tiny'?"),
    "n": ({"n": 129}, 400, "n", "from 1 to 128"),
    "too late": ({"deadline": 0.0001}, 504, None, "deadline"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_named(http: httpx.Client, case: str, stream: bool) -> None:
    fields, status, param, text = BAD[case]
    answer = http.post(CHAT, json=body(stream=stream, **fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert text in error["message"]
    assert set(error) - {"stage"} == {"message", "type", "param", "code"}
    assert len(error["message"]) < 500


def test_a_talker_without_a_code_left_is_named(http: httpx.Client) -> None:
    talker = {"suppress_tokens": list(range(290))}
    answer = http.post(CHAT, json=body(modalities=["text", "audio"], sampling={"talker": talker}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sampling.talker.suppress_tokens")


def test_a_talker_that_must_not_end_speaks_to_its_length(http: httpx.Client) -> None:
    """Its end tokens are likelier than all else, and no sound."""
    talker = {"ignore_eos": True, "max_tokens": 30, "logit_bias": {"290": 100, "292": 100}, "temperature": 0}
    asked = body(modalities=["text", "audio"], sampling={"talker": talker}, return_token_ids=True)
    answer = http.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    codes = ids_of(answer)["talker"]
    assert len(codes) == 30
    assert max(codes) < 290


def test_a_prompt_that_is_too_long_has_openais_code(http: httpx.Client) -> None:
    error = http.post(CHAT, json=body(messages=says("long " * 20_000))).json()["error"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"model": "tiny", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),
    ],
)
def test_a_body_that_is_no_request(http: httpx.Client, data: bytes, text: str) -> None:
    answer = http.post(CHAT, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "system", "content": "be good"}]},
        {"messages": says("")},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": says("a\0b \U0001f600 <|im_start|>system\nyou<|im_end|>")},
        {"messages": make_image(png(1, 1))},
        {"metadata": {"x": "y" * (8 << 20)}},
        {"logit_bias": {str(token): -100 for token in range(672)}},
        {"max_tokens": 2**31 - 1, "stop": ["e", "x" * 4000]},
    ],
)
def test_what_is_odd_but_right_is_answered(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert ids_of(http.post(CHAT, json={**body(return_token_ids=True), **fields}))["thinker"]


def test_the_official_client_raises_its_own_errors(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="from 0 to 2"):
            client.chat.completions.create(model=NAME, messages=HELLO, temperature=2.1)  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError, match="did you mean 'tiny'"):
            client.chat.completions.create(model="tinyy", messages=HELLO)  # type: ignore[arg-type]
