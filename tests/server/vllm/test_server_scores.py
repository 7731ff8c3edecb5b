"""POST /v1/score and /v1/rerank, on a model of embeddings and on a cross-encoder."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import FakeService, Live, live

from segue.messages.deltas import Delta, EmbeddingDelta, Finished, RequestMetrics, ScoreDelta, Usage
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.server.settings import ServerSettings

DOCUMENTS = ["acute", "narrow", "wide", "obtuse"]
ANGLES = {"flat": 0, "acute": 30, "narrow": 10, "wide": 80, "obtuse": 120, "": 0}


async def embed(request: Request) -> AsyncGenerator[Delta]:
    """A text is a direction; its length means nothing."""
    if request.prompt == "too long":
        raise InvalidRequest("the text has 9 tokens; this model takes at most 8", field="prompt")
    angle = math.radians(ANGLES[request.prompt or ""])
    length = len(request.prompt or "")
    yield EmbeddingDelta("embedder", np.array([math.cos(angle), math.sin(angle)], "<f4").__mul__(length).tobytes())
    yield Finished("stop", {}, Usage(prompt_tokens=length), RequestMetrics())


async def cross(request: Request) -> AsyncGenerator[Delta]:
    """Tells pairs, and their order, apart."""
    pair = request.options["text_pair"]
    if pair == "too long":
        raise InvalidRequest("the two texts have 9 tokens; this model takes at most 8", field="prompt")
    yield ScoreDelta("scorer", len(request.prompt or "") + len(pair) / 100)
    yield Finished("stop", {}, Usage(prompt_tokens=3), RequestMetrics())


def served(script: Any, gives: str, *options: str) -> FakeService:
    service = FakeService(script)
    service.card.gives, service.card.options = frozenset({gives}), frozenset(options)
    return service


@pytest.fixture(scope="module")
def embedder() -> Iterator[Live]:
    with live(served(embed, "embedding")) as server:
        yield server


@pytest.fixture(scope="module")
def encoder() -> Iterator[Live]:
    with live(served(cross, "score", "text_pair", "use_activation")) as server:
        yield server


def post(server: Live, path: str, **body: Any) -> httpx.Response:
    server.service.requests.clear()
    return httpx.post(f"{server.url}{path}", json={"model": "fake-omni", **body}, timeout=120)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    "sides", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores_are_cosines(embedder: Live, path: str, sides: tuple[str, str]) -> None:
    answer = post(embedder, path, **{sides[0]: "flat", sides[1]: DOCUMENTS}).json()
    assert (answer["object"], answer["model"]) == ("list", "fake-omni")
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert {entry["object"] for entry in answer["data"]} == {"score"}
    expected = [math.cos(math.radians(ANGLES[text])) for text in DOCUMENTS]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-6)
    tokens = sum(map(len, ("flat", *DOCUMENTS)))
    assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def test_texts_in_pairs(embedder: Live) -> None:
    answer = post(embedder, "/v1/score", text_1=["acute", "wide"], text_2=["wide", "wide"]).json()
    found = [entry["score"] for entry in answer["data"]]
    assert found == pytest.approx([math.cos(math.radians(50)), 1.0], abs=1e-6)
    [only] = post(embedder, "/v1/score", text_1="acute", text_2="acute").json()["data"]
    assert only["score"] == pytest.approx(1.0)


def test_a_vector_of_nothing_fits_nothing(embedder: Live) -> None:
    [only] = post(embedder, "/v1/score", text_1="acute", text_2="").json()["data"]
    assert only["score"] == 0.0


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_best_first(embedder: Live, path: str) -> None:
    answer = post(embedder, path, query="flat", documents=["acute", {"text": "narrow"}, "wide", "obtuse"]).json()
    results = answer["results"]
    assert [entry["index"] for entry in results] == [1, 0, 2, 3]
    assert [entry["document"]["text"] for entry in results] == ["narrow", "acute", "wide", "obtuse"]
    assert results[0]["relevance_score"] == pytest.approx(math.cos(math.radians(10)), abs=1e-6)
    tokens = sum(map(len, ("flat", *DOCUMENTS)))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["model"] == "fake-omni"


def test_so_many_of_the_best(embedder: Live) -> None:
    some = post(embedder, "/v1/rerank", query="flat", documents=DOCUMENTS, top_n=2, return_documents=False).json()
    assert [entry["index"] for entry in some["results"]] == [1, 0]
    assert all("document" not in entry for entry in some["results"])
    for top_n in (0, 9, None):
        assert len(post(embedder, "/v1/rerank", query="flat", documents=DOCUMENTS, top_n=top_n).json()["results"]) == 4


def test_a_cross_encoder_reads_pairs(encoder: Live) -> None:
    answer = post(encoder, "/v1/score", text_1="flat", text_2=DOCUMENTS, use_activation=False).json()
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([4.05, 4.06, 4.04, 4.06])
    assert answer["usage"]["prompt_tokens"] == 12
    asked = encoder.service.requests
    assert [request.options["text_pair"] for request in asked] == DOCUMENTS
    assert all(request.options["use_activation"] is False for request in asked)
    assert all(request.modalities == ["score"] for request in asked)
    pairs = post(encoder, "/v1/score", text_1=["a", "bb"], text_2=["ccc", "d"]).json()
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([1.03, 2.01])
    ranked = post(encoder, "/v1/rerank", query="flat", documents=DOCUMENTS).json()
    assert [entry["index"] for entry in ranked["results"]] == [1, 3, 0, 2]


def test_whose_turn_it_is(embedder: Live) -> None:
    assert post(embedder, "/v1/rerank", query="flat", documents=["wide"], user="u", priority=-1).status_code == 200
    assert {(request.tenant, request.priority) for request in embedder.service.requests} == {("u", -1)}


@pytest.mark.parametrize(
    ("path", "fields", "field", "text"),
    [
        ("/v1/score", {}, "text_1", "no texts are given; give text_1 and text_2"),
        ("/v1/score", {"text_1": "flat"}, "text_1", "given: text_1; give"),
        ("/v1/score", {"text_1": "flat", "documents": "wide"}, "documents", "given: text_1 and documents; give"),
        ("/v1/score", {"text_1": [], "text_2": "wide"}, "text_1", "text_1 is empty"),
        ("/v1/score", {"text_1": ["flat"] * 2, "text_2": ["wide"] * 3}, "text_1", "2 texts and text_2 3"),
        ("/v1/score", {"text_1": "flat", "text_2": [3]}, "text_2[0]", "text_2[0] is 3"),
        ("/v1/score", {"text_1": "too long", "text_2": "wide"}, "text_1", "at most 8"),
        ("/v1/score", {"text_1": "flat", "text_2": "too long"}, "text_2", "at most 8"),
        ("/v1/score", {"text_1": "flat", "text_2": ["wide"] * 2049}, "text_2", "at most 2048"),
        ("/v1/score", {"text_1": "flat", "text_2": "wide", "text_3": "x"}, "text_3", "did you mean"),
        ("/v1/score", {"text_1": "flat", "text_2": "wide", "model": "other"}, "model", "is not served here"),
        (
            "/v1/score",
            {"text_1": "flat", "text_2": "wide", "use_activation": False},
            "use_activation",
            "its score is a cosine",
        ),
        (
            "/v1/score",
            {"text_1": "flat", "text_2": "wide", "truncate_prompt_tokens": 9},
            "truncate_prompt_tokens",
            "leave it out",
        ),
        ("/v1/rerank", {"documents": ["wide"]}, "query", "query is missing"),
        ("/v1/rerank", {"query": "flat", "documents": []}, "documents", "documents is empty"),
        ("/v1/rerank", {"query": "flat", "documents": ["wide"], "top_n": -1}, "top_n", "top_n is -1"),
        ("/v1/rerank", {"query": "flat", "documents": [{"title": "x"}]}, "documents[0]", "text"),
        ("/v1/rerank", {"query": "flat", "documents": ["wide", "too long"]}, "documents", "at most 8"),
        (
            "/v1/rerank",
            {"query": "flat", "documents": ["wide"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
            "leave it out",
        ),
    ],
)
def test_what_is_wrong_is_named(embedder: Live, path: str, fields: dict[str, Any], field: str, text: str) -> None:
    answer = post(embedder, path, **fields)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert text in error["message"]


def test_pairs_that_are_too_long(encoder: Live) -> None:
    answer = post(encoder, "/v1/rerank", query="flat", documents=["wide", "too long"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/score", {"text_1": "a", "text_2": "b"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})],
)
def test_a_model_that_writes_scores_nothing(path: str, body: dict[str, Any]) -> None:
    with live(FakeService()) as server:
        error = post(server, path, **body).json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert "gives neither scores nor embeddings (it gives audio, image, text)" in error["message"]


def test_the_key_is_asked_for() -> None:
    with live(served(embed, "embedding"), ServerSettings(api_key="secret", drain_seconds=1)) as server:
        for path in ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"):
            assert post(server, path).status_code == 401
