"""What is wrong is refused with OpenAI's error object, by name; nothing a client sends makes a 500."""

from __future__ import annotations

import json
import socket
import tracemalloc
from collections.abc import AsyncGenerator, Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import openai
import pytest
from fake_service import FakeService, Live, finished, live
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.messages.deltas import Delta
from segue.messages.errors import LONGEST_NAME, InvalidRequest
from segue.messages.request import Request
from segue.server.http.body import unreadable_number
from segue.server.settings import ServerSettings

HELLO = [{"role": "user", "content": "Say hello"}]
SHARED = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
"""One server for all examples."""


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeService(), ServerSettings(max_body_bytes=50_000)) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "fake-omni", "messages": HELLO, **body})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        # types
        ({"n": "two"}, "n", "n is 'two': expected int, got str"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot': expected float"),
        ({"temperature": True}, "temperature", "temperature is True: expected float"),
        ({"stream": 1}, "stream", "stream is 1: expected bool"),
        ({"stop": 5}, "stop", "stop is 5: expected str | array"),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] is 5: expected str"),
        ({"modalities": "text"}, "modalities", "modalities is 'text': expected array"),
        ({"audio": "Anna"}, "audio", "audio is 'Anna': expected object"),
        ({"audio": {"voice": 3}}, "audio.voice", "audio.voice is 3: expected str"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "expected float"),
        ({"sampling": {"thinker": 3}}, "sampling", "expected object"),
        ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options.include_usage", "expected bool"),
        ({"messages": "hi"}, "messages", "messages is 'hi'; it must be a list"),
        ({"model": 5}, "model", "model is 5: expected str"),
        # unknown names
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"audio": {"voise": "Anna"}}, "audio.voise", "did you mean 'voice'"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "did you mean 'include_usage'"),
        ({"sampling": {"thinke": {}}}, "sampling", "did you mean 'thinker'"),
        ({"sampling": {"vocoder": {}}}, "sampling", "no stage that samples"),
        ({"sampling": {"talker": {"topk": 1}}}, "sampling.talker.topk", "did you mean 'top_k'"),
        ({"options": {"use_audio": True}}, "options.use_audio", "did you mean 'use_audio_in_video'"),
        ({"modalities": ["text", "sound"]}, "modalities[1]", "this model gives: audio, image, text"),
        ({"audio": {"format": "mp4"}}, "audio.format", "did you mean 'mp3'"),
        # values
        ({"temperature": 3}, "temperature", "temperature is 3.0; it must be a number from 0 to 2"),
        ({"temperature": -0.1}, "temperature", "from 0 to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -2}, "top_k", "top_k is -2"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty", "-2 to 2"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "give one"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens", "more than max_tokens"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "no token id"),
        ({"top_k": 10**400}, "top_k", "-1 or 0"),
        ({"temperature": 10**400}, "temperature", "out of range"),
        ({"options": {"use_audio_in_video": 10**300}}, "options", "too large"),
        ({"structured_outputs": {"json": {"maximum": 2**64}}}, "structured_outputs.json", "64 bits"),
        ({"guided_json": {"maximum": -(2**64)}}, "guided_json", "64 bits"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"maximum": 2**64}}}},
            "response_format.json_schema.schema",
            "64 bits",
        ),
        (
            {"sampling": {"thinker": {"structured_outputs": {"json": {"maximum": 2**64}}}}},
            "sampling.thinker.structured_outputs.json",
            "64 bits",
        ),
        ({"user": "x" * 257}, "user", "at most 256"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "no token id"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids", "no token id"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"n": 0}, "n", "from 1 to 16"),
        ({"n": 17}, "n", "from 1 to 16"),
        ({"seed": 2**64}, "seed", "64-bit"),
        ({"seed": 10**40}, "seed", "seed"),
        ({"deadline": 0}, "deadline", "above 0"),
        ({"priority": 2**31}, "priority", "32-bit"),
        ({"priority": -(2**31) - 1}, "priority", "32-bit"),
        ({"bad_words": ["a"] * 1025}, "bad_words", "at most 1024"),
        ({"modalities": []}, "modalities", "empty"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
        ({"sampling": {"talker": {"temperature": 9}}}, "sampling.talker.temperature", "from 0 to 2"),
        ({"messages": []}, "messages", "at least one"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids", "give one"),
        ({"messages": None, "prompt_token_ids": []}, "prompt_token_ids", "at least one"),
        ({"messages": None, "prompt_token_ids": [-1]}, "prompt_token_ids", "list of token ids"),
        # OpenAI's that cannot be honoured
        ({"tools": [{"type": "function"}]}, "tools[0]", "missing required field function"),
        ({"tools": [{"function": {"name": "look"}}]}, "tools", "does not support"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 128 letters"),
        ({"tools": [{"function": {"name": "a"}}, {"function": {"name": "a"}}]}, "tools[1].function.name", "twice"),
        ({"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools[0].type", "must be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "tools is missing or empty"),
        ({"tool_choice": "requird"}, "tool_choice", "did you mean 'required'"),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "known: none, minimal, low"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "does not support"),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood", "unknown parameter"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "both true"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"store": True, "n": 2}, "n", "1 if store is true"),
        ({"previous_response_id": 7}, "previous_response_id", "7"),
        ({"prediction": {"type": "content"}}, "prediction", "leave it out"),
        # media
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
            "messages[0].content[0].image_url.url",
            "no media root",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://x/y"}}]}]},
            "messages[0].content[0].video_url.url",
            "fetches no URLs",
        ),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(
    http: httpx.Client, server: Live, body: dict[str, Any], param: str, says: str
) -> None:
    server.service.requests.clear()
    answer = ask(http, **body)
    error = error_of(answer)
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert error["param"] == param
    assert server.service.requests == [], "a refused request does not reach the stages"


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
        {"reasoning_effort": "none", "include_reasoning": False, "add_generation_prompt": False},
        {"temperature": None, "stop": None, "n": None, "stream": None, "audio": None, "tools": None, "seed": None},
        {"temperature": 0, "top_p": 1, "top_k": -1, "seed": -1, "stop": "x"},
        {"audio": {"voice": "Anna", "format": "mp3"}},
        {"options": {"use_audio_in_video": False}},
    ],
)
def test_what_asks_for_nothing_impossible_is_taken(http: httpx.Client, body: dict[str, Any]) -> None:
    assert ask(http, **body).status_code == 200


@pytest.mark.parametrize(
    ("status", "code", "param", "body"),
    [
        (404, "model_not_found", "model", {"model": "fake-omnii"}),
        (404, "not_found", "audio.voice", {"audio": {"voice": "Bem"}}),
    ],
)
def test_an_unknown_name_is_404(http: httpx.Client, status: int, code: str, param: str, body: dict[str, Any]) -> None:
    answer = ask(http, **body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert "did you mean" in error["message"]


def test_the_official_client_sees_its_own_errors(server: Live) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt", messages=HELLO)  # type: ignore[arg-type]
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="fake-omni", messages=HELLO, temperature=7)  # type: ignore[arg-type]
        assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")


def test_what_is_missing_is_named(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/chat/completions", json={"model": "fake-omni"}))
    assert (error["param"], error["message"]) == ("messages", "messages is missing")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff\xfe", b'{"model": "\xff"}', b'{"a": NaN',
     b"[" * 20_000 + b"]" * 20_000, b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}", b'{"x": "\\ud800"}'],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "the body" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"temperature": NaN}', "temperature", "NaN"),
        (b'{"messages": [{"content": [1, -Infinity]}]}', "messages[0].content[1]", "-Infinity"),
        (b'{"top_p": 1e999}', "top_p", "too large"),
        (b'{"options": {"n": -1e400}}', "options.n", "too large"),
        (b'{"n": ' + b"9" * 5000 + b"}", "n", "too large"),
    ],
)
def test_numbers_that_are_none_are_named(http: httpx.Client, body: bytes, param: str, says: str) -> None:
    answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


def test_a_body_that_is_not_declared_as_json_is_415(http: httpx.Client) -> None:
    body = json.dumps({"model": "fake-omni", "messages": HELLO})
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": content_type})
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    answer = http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("size", [60_000, 500_000])
def test_a_body_over_the_limit_is_413(http: httpx.Client, size: int) -> None:
    for content in (b"x" * size, (b"x" * 1000 for _ in range(size // 1000))):
        answer = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (413, "too_large")
        assert "max_body_bytes" in error["message"]


def test_a_body_that_is_said_to_be_far_over_the_limit_is_not_waited_for(server: Live) -> None:
    url = httpx.URL(server.url)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    for length in (100_001, 10**14):
        with socket.create_connection((url.host, url.port or 0), timeout=60) as sock:
            sock.sendall(head.format(length).encode())
            answer = HTTPResponse(sock)
            answer.begin()
            error = json.loads(answer.read())["error"]
        assert (answer.status, error["code"]) == (413, "too_large")
        assert all(fact in error["message"] for fact in (str(length), "50000", "max_body_bytes"))


def test_a_kind_the_model_does_not_take_is_named() -> None:
    service = FakeService()
    service.card.takes = frozenset({"text", "image"})
    content = [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]
    with live(service) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        error = error_of(ask(http, messages=[{"role": "user", "content": content}]))
    assert error["param"] == "messages[0].content[0]"
    assert "this model takes: image, text" in error["message"]


def test_text_parameters_need_a_text_stage() -> None:
    service = FakeService()
    service.card.text_stage = None
    service.card.gives = frozenset({"image"})
    with live(service) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert "no stage that makes text" in error_of(ask(http, temperature=0))["message"]
        assert ask(http, seed=3).json()["choices"][0]["message"]["images"]
    assert service.requests[-1].modalities == ["image"]


@pytest.mark.parametrize(
    ("body", "named", "param"),
    [
        ({"top_k": 3}, "top_k", "top_k"),
        ({"sampling": {"thinker": {"top_k": 3}}}, "top_k", "sampling.thinker.top_k"),
        ({"top_k": 4, "sampling": {"thinker": {"top_k": 3}}}, "top_k", "sampling.thinker.top_k"),
        ({"guided_json": {}}, "structured_outputs.json", "guided_json"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs", "response_format"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stage_s_error_names_what_the_client_wrote(path: str, body: dict[str, Any], named: str, param: str) -> None:
    async def refuses(request: Request) -> AsyncGenerator[Delta]:
        field = f"sampling.thinker.{named}"
        raise InvalidRequest(f"{field} will not do", field=field)
        yield finished()

    asked = {"model": "fake-omni", **body}
    asked |= {"prompt": "Say"} if path == "/v1/completions" else {"messages": HELLO}
    with live(FakeService(refuses)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        for stream in (False, True):
            answer = http.post(path, json={**asked, "stream": stream})
            error = json.loads(answer.text.removeprefix("data: ").splitlines()[0])["error"]
            assert (error["param"], error["message"]) == (param, f"{param} will not do")


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_NAMES = (
    "modalities", "audio", "stream", "stream_options", "n", "seed", "stop", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p", "min_tokens",
    "repetition_penalty", "stop_token_ids", "suppress_tokens", "ignore_eos", "sampling", "return_token_ids", "tools",
    "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "continue_final_message",
    "return_metrics", "priority", "deadline", "options", "response_format", "logprobs", "store", "user", "messages",
)  # fmt: skip
_SHAPED = {
    "audio": st.fixed_dictionaries({}, optional={"voice": _JSON, "format": _JSON}),
    "sampling": st.dictionaries(
        st.sampled_from(["thinker", "talker", "x"]), st.dictionaries(st.sampled_from(_NAMES[4:22]), _JSON, max_size=3)
    ),
    "logit_bias": st.dictionaries(st.integers().map(str) | st.text(max_size=3), st.floats(-200, 200) | _JSON),
    "n": st.integers(-1, 18) | _JSON,
    "seed": st.integers() | _JSON,
    "deadline": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
}


@pytest.mark.slow
@settings(SHARED, max_examples=400)
@given(
    body=st.fixed_dictionaries(
        {}, optional={name: _SHAPED.get(name, _JSON) | _JSON for name in _NAMES}
    ).flatmap(lambda body: st.lists(st.sampled_from(sorted(body)), max_size=3, unique=True).map(
        lambda keep: {name: body[name] for name in keep}) if body else st.just({}))
)  # fmt: skip
def test_no_body_makes_a_500(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = ask(http, **body)
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500
        assert error_of(answer)["message"]


@settings(SHARED, max_examples=150)
@given(body=st.binary(max_size=200) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_a_500(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["message"]


def test_the_name_of_a_number_is_made_for_that_one_alone() -> None:
    """Under a long name, many values: a path for each would take 400 MB."""
    name = "a" * 20_000
    body = f'{{"{name}": [{"0," * 20_000}NaN]}}'.encode()
    tracemalloc.start()
    try:
        error = unreadable_number(body)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert error is not None
    assert error.message == f"{'a' * LONGEST_NAME} is NaN, which is not JSON"
