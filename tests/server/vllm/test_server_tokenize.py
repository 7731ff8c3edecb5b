"""`/tokenize`, `/detokenize`, `/tokenizer_info` and `/openapi.json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_service import FakeService, Live, live
from starlette.routing import Route, WebSocketRoute

from segue.models.shared.dialects.dialect import Dialect
from segue.models.shared.text.chat_template import ChatTemplate
from segue.server.app import create_app
from segue.server.settings import ServerSettings

TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    service = FakeService()
    service.card.dialect = Dialect(
        ChatTemplate("{{ tools }}{{ mood }}"),
        special_tokens=(("eos_token", "</s>"),),
        tokenizer_class="Qwen2Tokenizer",
    )
    service.card.vocab_sizes = {"thinker": 300}
    with live(service) as server:
        yield server


def test_a_prompt_becomes_ids_and_ids_a_prompt(http: httpx.Client, server: Live) -> None:
    answer = http.post("/tokenize", json={"prompt": "Hi", "add_special_tokens": False}).json()
    assert answer == {"count": 2, "max_model_len": 1000, "tokens": [172, 205], "token_strs": None}
    [request] = server.service.requests
    assert (request.modalities, request.add_special_tokens) == (["tokens"], False)
    assert server.service.cancelled.empty(), "it ran to its end"
    answer = http.post("/tokenize", json={"model": "fake-omni", "prompt": "Hi", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["H", "i"]
    assert http.post("/detokenize", json={"tokens": [172, 205]}).json() == {"prompt": "Hi"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_messages_go_through_the_template(http: httpx.Client, server: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [TOOL],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"mood": "calm"},
    }
    server.service.card.dialect = server.service.card.dialect.with_calls("hermes")
    assert http.post("/tokenize", json=body).status_code == 200
    [request] = server.service.requests
    assert request.messages[0].role == "user"
    assert (request.chat.tools, request.chat.add_generation_prompt) == ([TOOL], False)
    assert request.chat.template_kwargs == {"mood": "calm"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 300]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def test_the_tokenizer_is_told_of(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["tokenizer_class"], info["eos_token"]) == ("Qwen2Tokenizer", "</s>")
    assert (info["bos_token"], info["chat_template"]) == (None, "{{ tools }}{{ mood }}")


def test_the_key_guards_these_too() -> None:
    with live(FakeService(), ServerSettings(api_key="s3cret")) as server:
        for path in ("/tokenize", "/detokenize"):
            assert httpx.post(server.url + path, json={}, timeout=120).status_code == 401
        assert httpx.get(f"{server.url}/tokenizer_info", timeout=120).status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        assert (
            httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, headers=headers, timeout=120).status_code == 200
        )


def test_every_endpoint_is_in_the_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path, operations in document["paths"].items():
        for method in operations:
            answer = http.request(method, path.replace("{name}", "fake-omni"), json={})
            if "{response_id}" in path:
                assert "{response_id}" in answer.json()["error"]["message"], "one that is not known"
                continue
            assert answer.status_code not in (404, 405), path
    schemas = document["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, entry in value.items():
                if key == "$ref":
                    yield entry
                else:
                    yield from references(entry)
        elif isinstance(value, list):
            for entry in value:
                yield from references(entry)

    found = set(references(document))
    assert {f"#/components/schemas/{name}" for name in schemas} == found, "each is there, and used"
    chat = schemas["ChatBody"]
    assert not chat["required"], "the model is the one that is served"
    assert {"messages", "tools", "temperature", "chat_template_kwargs"} <= set(chat["properties"])
    assert not schemas["CompletionBody"]["required"], "a prompt, or its embeddings"


def test_the_document_has_every_route(server: Live, http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in create_app(server.service).routes
        if isinstance(route, Route) and route.include_in_schema  # others are there to be refused
        for method in route.methods or ()
    }
    routes |= {(route.path, "get") for route in create_app(server.service).routes if isinstance(route, WebSocketRoute)}
    assert routes == {(path, method) for path, operations in document["paths"].items() for method in operations}
