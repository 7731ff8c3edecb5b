"""POST /classify and /pooling, as vLLM has them."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import FakeService, Live, live

from segue.messages.deltas import ClassesDelta, Delta, EmbeddingDelta, Finished, RequestMetrics, Usage
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.server.generation.text_requests import AT_ONCE
from segue.server.settings import ServerSettings

NAME = "fake-omni"
LABELS = ("calm", "glad", "sad")


def numbers_of(request: Request) -> np.ndarray:
    """Tells texts apart by their length; bare logits are ten times as large."""
    size = len(request.prompt_token_ids or request.prompt or "")
    scale = 10 if request.options.get("use_activation") is False else 1
    values = np.array([0.25, 0.5 if size % 2 else 0.125, size], dtype="<f4") * scale
    return values[: request.options.get("dimensions")]


async def play(request: Request) -> AsyncGenerator[Delta]:
    if request.prompt == "too long":
        raise InvalidRequest("the text has 9 tokens; this model takes at most 8", field="prompt")
    values = numbers_of(request)
    if request.modalities == ["classes"]:
        yield ClassesDelta("classifier", values.tobytes(), LABELS[int(values[:2].argmax())])
    else:
        yield EmbeddingDelta("embedder", values.tobytes())
    tokens = len(request.prompt_token_ids or request.prompt or "")
    yield Finished("stop", {}, Usage(prompt_tokens=tokens), RequestMetrics())


def service(gives: str, *options: str) -> FakeService:
    made = FakeService(play)
    made.card.gives, made.card.options = frozenset({gives}), frozenset(options)
    return made


@pytest.fixture(scope="module")
def sorting() -> Iterator[Live]:
    with live(service("classes", "use_activation")) as server:
        yield server


@pytest.fixture(scope="module")
def embedding() -> Iterator[Live]:
    with live(service("embedding", "dimensions")) as server:
        yield server


def post(server: Live, path: str, **fields: Any) -> httpx.Response:
    server.service.requests.clear()
    return httpx.post(f"{server.url}{path}", json={"model": NAME, "input": "sea", **fields}, timeout=120)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes(sorting: Live, path: str) -> None:
    answer = post(sorting, path, input=["sea", "ship"], user="u", priority=-1).json()
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 1.7e9
    assert answer == {
        "object": "list",
        "model": NAME,
        "data": [
            {"index": 0, "label": "glad", "probs": [0.25, 0.5, 3.0], "num_classes": 3},
            {"index": 1, "label": "calm", "probs": [0.25, 0.125, 4.0], "num_classes": 3},
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7},
    }
    for request in sorting.service.requests:
        assert (request.tenant, request.priority, request.modalities) == ("u", -1, ["classes"])


def test_bare_logits_and_names(sorting: Live) -> None:
    answer = post(sorting, "/classify", use_activation=False, request_id="mine", add_special_tokens=False).json()
    assert answer["id"] == "classify-mine"
    assert answer["data"][0]["probs"] == [2.5, 5.0, 30.0]
    assert sorting.service.requests[0].add_special_tokens is False


@pytest.mark.parametrize(
    ("given", "count"),
    [("sea", 1), ([7, 8], 1), ([[5], [6, 9]], 2), (["a"] * (2 * AT_ONCE + 1), 2 * AT_ONCE + 1)],
    ids=["text", "ids", "lists of ids", "many"],
)
def test_all_kinds_of_input(sorting: Live, given: Any, count: int) -> None:
    answer = post(sorting, "/classify", input=given).json()
    assert [entry["index"] for entry in answer["data"]] == list(range(count))


@pytest.mark.parametrize("path", ["/pooling", "/v1/pooling"])
def test_pooling_is_what_the_model_gives(sorting: Live, embedding: Live, path: str) -> None:
    """Classes of a classifier, vectors of a model of embeddings; by task where one is named."""
    for server, task in ((sorting, "classify"), (embedding, "embed")):
        for named in ({}, {"task": task}, {"encoding_format": "base64", "embed_dtype": "float32"}):
            answer = post(server, path, input=["sea", "ship"], **named).json()
            assert answer["id"].startswith("pool-")
            rows = [entry.pop("data") for entry in answer["data"]]
            if "encoding_format" in named:
                rows = [np.frombuffer(base64.b64decode(row), dtype="<f4").tolist() for row in rows]
            assert rows == [[0.25, 0.5, 3.0], [0.25, 0.125, 4.0]]
            assert answer["data"] == [{"index": 0, "object": "pooling"}, {"index": 1, "object": "pooling"}]
            assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    assert post(embedding, path, dimensions=2).json()["data"][0]["data"] == [0.25, 0.5]
    assert post(sorting, path, use_activation=False).json()["data"][0]["data"] == [2.5, 5.0, 30.0]


@pytest.mark.parametrize(
    ("path", "fields", "field", "text"),
    [
        ("/classify", {"input": []}, "input", "input is empty"),
        ("/classify", {"input": ["a", "too long"]}, "input", "takes at most 8"),
        ("/classify", {"messages": [{"role": "user", "content": "a"}]}, "messages", "leave it out"),
        ("/classify", {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "cannot truncate texts: leave it out"),
        ("/classify", {"use_activation": "no"}, "use_activation", "use_activation is 'no'"),
        ("/classify", {"request_id": ""}, "request_id", "visible ASCII"),
        ("/classify", {"lables": 1}, "lables", "unknown parameter"),
        ("/classify", {"model": "other"}, "model", "is not served here"),
        ("/pooling", {"task": "token_embed"}, "task", "this server supports embed and classify"),
        ("/pooling", {"task": "clasify"}, "task", "did you mean 'classify'"),
        ("/pooling", {"task": "embed"}, "task", "gives no embeddings (it gives classes)"),
        ("/pooling", {"dimensions": 2}, "dimensions", "classes cannot be truncated"),
        ("/pooling", {"encoding_format": "bytes"}, "encoding_format", "float or base64"),
        ("/pooling", {"endianness": "big"}, "endianness", "use 'native' or 'little'"),
    ],
)
def test_what_is_wrong_is_named(sorting: Live, path: str, fields: dict[str, Any], field: str, text: str) -> None:
    answer = post(sorting, path, **fields)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    error = answer.json()["error"]
    assert (error["param"], text in error["message"]) == (field, True), error


def test_what_a_model_of_embeddings_has_not(embedding: Live) -> None:
    for path, fields, text in (
        ("/classify", {}, "gives no classes (it gives embedding)"),
        ("/pooling", {"task": "classify"}, "gives no classes"),
        ("/pooling", {"use_activation": False}, "as the checkpoint makes them"),
    ):
        answer = post(embedding, path, **fields)
        assert (answer.status_code, text in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_model_that_writes_has_neither() -> None:
    with live(FakeService()) as server:
        for path in ("/classify", "/pooling"):
            answer = post(server, path)
            assert (answer.status_code, "it gives audio, image, text" in answer.text) == (400, True)


def test_the_key_is_asked_for() -> None:
    with live(service("classes"), ServerSettings(api_key="secret", drain_seconds=1)) as server:
        for path in ("/classify", "/v1/classify", "/pooling", "/v1/pooling"):
            assert post(server, path).status_code == 401
