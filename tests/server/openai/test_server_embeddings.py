"""POST /v1/embeddings as the official client uses it, and as a careless one does."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_service import FakeService, Live, live

from segue.messages.deltas import Delta, EmbeddingDelta, Finished, RequestMetrics, Usage
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.server.generation.text_requests import AT_ONCE

URL = "/v1/embeddings"


def vector_of(request: Request) -> np.ndarray:
    """Tells texts and lengths apart."""
    given = request.prompt_token_ids or [len(request.prompt or "")]
    size = request.options.get("dimensions", 4)
    return np.array([*given, 0.5, -1 / 3, 2.0][:size], dtype="<f4")


async def embed(request: Request) -> AsyncGenerator[Delta]:
    if request.prompt == "too long":
        raise InvalidRequest("the text has 9 tokens; this model takes at most 8", field="prompt")
    yield EmbeddingDelta("embedder", vector_of(request).tobytes())
    tokens = len(request.prompt_token_ids or request.prompt or "")
    yield Finished("stop", {}, Usage(prompt_tokens=tokens), RequestMetrics())


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    service = FakeService(embed)
    service.card.gives = frozenset({"embedding"})
    service.card.options = frozenset({"dimensions"})
    with live(service) as server:
        yield server


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    server.service.requests.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_one_text(client: openai.OpenAI, server: Live) -> None:
    """The client asks for base64 by itself, and reads it as float32."""
    answer = client.embeddings.create(model="fake-omni", input="sea")
    assert answer.object == "list"
    assert answer.model == "fake-omni"
    [entry] = answer.data
    assert (entry.object, entry.index) == ("embedding", 0)
    assert entry.embedding == pytest.approx([3.0, 0.5, -1 / 3, 2.0])
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    [request] = server.service.requests
    assert request.modalities == ["embedding"]


@pytest.mark.parametrize(
    ("given", "firsts"),
    [
        (["a", "bbb", "cc"], [1.0, 3.0, 2.0]),
        ([7, 8], [7.0]),
        ([[5], [6, 9]], [5.0, 6.0]),
        (["x" * n for n in range(1, 3 * AT_ONCE)], [float(n) for n in range(1, 3 * AT_ONCE)]),
    ],
    ids=["texts", "ids", "lists of ids", "many"],
)
@pytest.mark.parametrize("form", ["float", "base64"])
def test_all_kinds_of_input(client: openai.OpenAI, given: Any, firsts: list[float], form: Any) -> None:
    answer = client.embeddings.create(model="fake-omni", input=given, encoding_format=form)
    rows = [entry.embedding for entry in answer.data]
    if form == "base64":
        rows = [np.frombuffer(base64.b64decode(row), dtype="<f4").tolist() for row in rows]  # type: ignore[arg-type]
    assert [row[0] for row in rows] == firsts
    assert [entry.index for entry in answer.data] == list(range(len(firsts)))
    assert answer.usage.total_tokens == sum(map(len, given)) if not isinstance(given[0], int) else len(given)


def test_dimensions(client: openai.OpenAI, server: Live) -> None:
    answer = client.embeddings.create(model="fake-omni", input="sea", dimensions=2)
    assert answer.data[0].embedding == [3.0, 0.5]
    assert server.service.requests[0].options == {"dimensions": 2}


def test_ours(http: httpx.Client, server: Live) -> None:
    body = {"model": "fake-omni", "input": "a", "user": "u", "priority": -1, "add_special_tokens": False}
    assert http.post(URL, json=body).status_code == 200
    [request] = server.service.requests
    assert (request.priority, request.add_special_tokens, request.tenant) == (-1, False, "u")


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", 1]}, "input[1]", "all entries must be texts"),
        ({"input": [1, [2]]}, "input[0]", "all entries must be"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": {"a": 1}}, "input", "input is"),
        ({"input": None}, "input", "got null"),
        ({"encoding_format": "hex"}, "encoding_format", "float or base64"),
        ({"dimensions": "many"}, "dimensions", "dimensions is"),
        ({"dimension": 3}, "dimension", "did you mean 'dimensions'"),
        ({"input": ["a", "too long"]}, "input", "takes at most 8"),
        ({"input": [[1], [-2]]}, "input[1]", "a list of token ids"),
        ({"input": [[1], []]}, "input[1]", "at least one"),
        ({"deadline": -1}, "deadline", "seconds above 0"),
        ({"priority": 2**40}, "priority", "32-bit"),
        ({"model": "other"}, "model", "is not served here"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, fields: dict[str, Any], field: str, text: str) -> None:
    answer = http.post(URL, json={"model": "fake-omni", "input": "a", **fields})
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert text in error["message"]


def test_a_model_that_writes_gives_no_embeddings() -> None:
    with live(FakeService()) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        answer = client.post(URL, json={"model": "fake-omni", "input": "a"})
        assert answer.status_code == 400
        assert "gives no embeddings" in answer.json()["error"]["message"]


def test_a_model_whose_vectors_cannot_be_cut() -> None:
    service = FakeService(embed)
    service.card.gives, service.card.options = frozenset({"embedding"}), frozenset()
    with live(service) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        answer = client.post(URL, json={"model": "fake-omni", "input": "a", "dimensions": 2})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")


def test_all_texts_of_a_request_have_one_deadline() -> None:
    service = FakeService(embed)
    service.card.gives, service.card.deadline = frozenset({"embedding"}), 600.0
    with live(service) as server:
        asked = {"model": "fake-omni", "input": ["a"] * (2 * AT_ONCE + 1)}
        assert httpx.post(server.url + URL, json=asked, timeout=120).status_code == 200
    assert len(service.requests) == 2 * AT_ONCE + 1
    assert len({request.deadline for request in service.requests}) == 1
