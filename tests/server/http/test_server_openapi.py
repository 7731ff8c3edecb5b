"""What `/openapi.json` says of bodies and answers, against what the endpoints take and give."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from calling_model import CALLS, HERMES, LOOK, says
from fake_service import FakeService, Live, finished, live, speak
from painter import painter
from starlette.routing import Route, WebSocketRoute

from segue.messages.deltas import (
    ClassesDelta,
    Delta,
    EmbeddingDelta,
    ScoreDelta,
    SegmentDelta,
    TextDelta,
    TokenLogprobs,
    TopToken,
)
from segue.messages.request import Request
from segue.messages.speech import SpeechFacts
from segue.server.app import create_app
from segue.server.operations.openapi import GET, POST
from segue.server.settings import ServerSettings

NUMBERS = np.arange(3, dtype="<f4").tobytes()
HELLO = [{"role": "user", "content": "Hello"}]
TOKEN = TopToken(5, -0.5, 1, "Hi", b"Hi")


async def anything(request: Request) -> AsyncGenerator[Delta]:
    """What was asked for, of every kind."""
    [*wanted] = request.modalities
    if wanted in (["embedding"], ["classes"], ["score"]):
        made = {
            "embedding": EmbeddingDelta("x", NUMBERS),
            "classes": ClassesDelta("x", NUMBERS, "glad"),
            "score": ScoreDelta("x", 0.5),
        }
        yield made[wanted[0]]
        yield finished()
    elif "task" in request.options:
        yield TextDelta("thinker", "Good morning", [1, 2])
        yield SegmentDelta("thinker", 0.0, 1.0, "Good morning", [1, 2], 0, -0.5)
        yield msgspec.structs.replace(finished(), language="en", audio_seconds=1.0)
    else:
        async for delta in speak(request):
            asked = request.sampling.get("thinker")
            if isinstance(delta, TextDelta) and asked is not None and asked.logprobs is not None:
                delta = msgspec.structs.replace(delta, logprobs=[TokenLogprobs(TOKEN, [TOKEN])])
            yield delta


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    service = FakeService(anything)
    service.card.gives |= {"embedding", "classes", "score"}
    service.card.speech = SpeechFacts({"en": 50}, ["transcribe", "translate"], first_time=100, window=3000, stride=2)
    with live(service) as server:
        yield server


@pytest.fixture
def server(running: Live) -> Live:
    running.service.script = anything
    return running


def check(answer: Any, kind: Any) -> None:
    """It is of this type, and has nothing that the type does not name."""
    assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


CHAT = "/v1/chat/completions"
CHUNKED, USAGE = (CHAT, "/v1/completions"), {"include_usage": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "logprobs": True, "return_token_ids": True, "return_metrics": True}),
    (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}),
    ("/v1/completions", {"prompt": "Hello", "logprobs": 1, "return_token_ids": True, "return_metrics": True}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/responses", {"input": "Hello", "include": ["message.output_text.logprobs"]}),
    ("/v1/messages", {"model": "fake-omni", "messages": HELLO, "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_answers_are_of_their_schema(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    whole = http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    check(whole.json(), POST[path].answer)
    streamed = http.post(path, json={**body, "stream": True, **({"stream_options": USAGE} if path in CHUNKED else {})})
    told = events(streamed)
    assert len(told) > 3
    for event in told:
        check(event, POST[path].event)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_thoughts_are_of_their_schema(calling: None, http: httpx.Client, server: Live, stream: bool) -> None:
    assert server.service.card.dialect is HERMES
    flat = {"name": LOOK["name"], "input_schema": LOOK["parameters"]}
    nested = {"type": "function", "function": {"name": LOOK["name"], "parameters": LOOK["parameters"]}}
    for path, body in (
        (CHAT, {"messages": HELLO, "tools": [nested]}),
        ("/v1/responses", {"input": "Hello", "tools": [LOOK]}),
        ("/v1/messages", {"model": "fake-omni", "messages": HELLO, "max_tokens": 9, "tools": [flat]}),
    ):
        server.service.script = says("<think>\nHm.\n</think>\n\n" + CALLS)
        answer = http.post(path, json={**body, "stream": stream})
        for one in events(answer) if stream else [answer.json()]:
            check(one, POST[path].event if stream else POST[path].answer)
        assert '"look"' in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"input": "Hello"}),
        ("/v1/messages/count_tokens", {"model": "fake-omni", "messages": HELLO}),
        ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/v1/classify", {"input": "a"}),
        ("/v1/pooling", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        *((path, None) for path, (answer, _) in GET.items() if not isinstance(answer, str) and "{" not in path),
    ],
)
def test_other_answers_are_of_theirs(http: httpx.Client, path: str, body: dict[str, Any] | None) -> None:
    if path == "/v1/videos":
        pytest.skip("of models that make them: tests/server/openai/media/test_server_videos.py")
    answer = http.get(path) if body is None else http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    check(answer.json(), GET[path][0] if body is None else POST[path].answer)


def test_what_is_kept_is_of_its_schema(http: httpx.Client) -> None:
    made = http.post("/v1/responses", json={"input": "Hello"}).json()["id"]
    check(http.get(f"/v1/responses/{made}").json(), GET["/v1/responses/{response_id}"][0])
    items = http.get(f"/v1/responses/{made}/input_items").json()
    check(items, GET["/v1/responses/{response_id}/input_items"][0])


@pytest.mark.parametrize("form", ["json", "verbose_json"])
def test_transcriptions_are_of_their_schema(http: httpx.Client, form: str) -> None:
    path, file = "/v1/audio/transcriptions", {"file": ("a.wav", b"RIFF", "audio/wav")}
    check(http.post(path, data={"response_format": form}, files=file).json(), POST[path].answer)
    for event in events(http.post(path, data={"stream": "true"}, files=file)):
        check(event, POST[path].event)


def test_images_are_of_their_schema() -> None:
    path = "/v1/images/generations"
    with live(painter()) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        check(http.post(path, json={"prompt": "a"}).json(), POST[path].answer)
        told = events(http.post(path, json={"prompt": "a", "stream": True, "partial_images": 1, "progress": True}))
        assert len({event["type"] for event in told}) == 3
        for event in told:
            check(event, POST[path].event)
        check(http.post(CHAT, json={"messages": HELLO}).json(), POST[CHAT].answer)


def test_errors_are_of_their_schema(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, name in ((CHAT, "ErrorAnswer"), ("/v1/messages", "AnthropicErrorAnswer")):
        error = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
        assert error == {"$ref": f"#/components/schemas/{name}"}
        given = http.post(path, json={"nothing": 1}).json()
        schema = document["components"]["schemas"][name]
        assert set(schema["properties"]) == set(given)
        inner = schema["properties"]["error"]["$ref"].rpartition("/")[2]
        assert set(given["error"]) == set(document["components"]["schemas"][inner]["required"])


def test_bodies_name_what_is_required(http: httpx.Client) -> None:
    """And no part that the parser does not know."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    named = {name for name in schemas if name.endswith("Body") and "model" in schemas[name].get("required", [])}
    assert named == {"CountBody", "MessagesBody"}
    content = schemas["ChatBody"]["properties"]["messages"]["items"]["properties"]["content"]["anyOf"][1]
    kinds = [part["properties"]["type"]["const"] for part in content["items"]["anyOf"] if "properties" in part]
    for kind in kinds:  # what it names is known to the parser
        error = http.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": kind}]}]}).json()["error"]
        assert "no known part" not in error["message"], kind
    items = schemas["ResponsesBody"]["properties"]["input"]["anyOf"][1]["items"]["anyOf"]
    assert {item["properties"]["type"]["const"] for item in items} == {
        "message", "reasoning", "function_call", "function_call_output",
    }  # fmt: skip


def test_every_route_is_in_the_document(http: httpx.Client) -> None:
    documented = {
        (method, path) for path, methods in http.get("/openapi.json").json()["paths"].items() for method in methods
    }
    routed = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in create_app(FakeService()).routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    routed |= {("get", route.path) for route in create_app(FakeService()).routes if isinstance(route, WebSocketRoute)}
    refused = {("post", f"/v1/videos/{name}") for name in ("{video_id}/remix", "characters", "extensions", "edits")}
    assert routed - documented == refused  # these exist only to say what is not there
    assert documented <= routed


def test_what_needs_a_key_says_so(http: httpx.Client) -> None:
    with live(FakeService(), ServerSettings(drain_seconds=1, api_key="secret")) as server:
        paths = http.get("/openapi.json").json()["paths"]
        for path, operations in paths.items():
            for method, operation in operations.items():
                asked = httpx.request(method, server.url + path.replace("{", "").replace("}", ""), timeout=120)
                assert ("security" in operation) == (asked.status_code == 401), (method, path)
    assert {"x-api-key": []} in paths["/v1/messages"]["post"]["security"]
    assert {"x-api-key": []} not in paths[CHAT]["post"]["security"]
    assert "content" not in paths["/v1/videos/{video_id}/content"]["head"]["responses"]["200"]


def test_files_are_required(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for path, name in (("transcriptions", "TranscriptionBody"), ("translations", "TranslationBody")):
        assert "file" in schemas[name]["required"]
        answer = http.post(f"/v1/audio/{path}", files={"model": (None, "fake-omni")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    edit = schemas["EditBody"]
    assert "image" not in edit.get("required", [])
    assert edit["anyOf"] == [{"required": ["image"]}, {"required": ["images"]}]
    assert edit["properties"].keys() >= {"image", "images"}
