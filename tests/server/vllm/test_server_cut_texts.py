"""`truncate_prompt_tokens` and `truncation_side`, of every endpoint that reads a prompt or texts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import FakeService, Live, live

from segue.messages.deltas import (
    ClassesDelta,
    Delta,
    EmbeddingDelta,
    Finished,
    RequestMetrics,
    ScoreDelta,
    TextDelta,
    Usage,
)
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.server.settings import ServerSettings

pytestmark = pytest.mark.slow

CUT = {"truncate_prompt_tokens": 5, "truncation_side": "left"}
POSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/embeddings": ("embedding", {"input": "text"}),
    "/pooling": ("embedding", {"input": "text"}),
    "/classify": ("classes", {"input": "text"}),
    "/v1/score": ("score", {"text_1": "a", "text_2": "b"}),
    "/score": ("embedding", {"text_1": "a", "text_2": "b"}),
    "/v1/rerank": ("score", {"query": "a", "documents": ["b"]}),
}
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "text"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "text"}]},
}


async def play(request: Request) -> AsyncGenerator[Delta]:
    if request.options.get("truncate_prompt_tokens") == 9:
        raise InvalidRequest("truncate_prompt_tokens is 9; it must be …", field="options.truncate_prompt_tokens")
    numbers = np.array([1.0, 0.5], dtype="<f4").tobytes()
    match request.modalities:
        case ["embedding"]:
            yield EmbeddingDelta("embedder", numbers)
        case ["classes"]:
            yield ClassesDelta("classifier", numbers, "calm")
        case ["score"]:
            yield ScoreDelta("scorer", 0.5)
        case _:
            yield TextDelta("thinker", "Hi", [5])
    yield Finished("stop", {}, Usage(), RequestMetrics())


@pytest.fixture
def servers() -> Iterator[dict[str, Live]]:
    made = {}
    stack = []
    for gives in ("embedding", "classes", "score"):
        service = FakeService(play)
        service.card.gives, service.card.options = frozenset({gives}), frozenset(CUT)
        stack.append(live(service))
        made[gives] = stack[-1].__enter__()
    yield made
    for one in stack:
        one.__exit__(None, None, None)


def post(server: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "fake-omni", **body})


@pytest.mark.parametrize("path", POSTS)
def test_texts(servers: dict[str, Live], path: str) -> None:
    gives, body = POSTS[path]
    server = servers[gives]
    assert post(server, path, **body, **CUT).status_code == 200
    assert server.service.requests
    assert all(CUT.items() <= request.options.items() for request in server.service.requests)
    for name, value in (("truncate_prompt_tokens", 0), ("truncation_side", "middle"), ("truncate_prompt_tokens", 9)):
        error = post(server, path, **body, **{name: value}).json()["error"]
        assert error["param"] == name, error
    server.service.card.options = frozenset()
    refused = post(server, path, **body, truncate_prompt_tokens=3)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("path", TEXTS)
def test_prompts(path: str) -> None:
    with live(FakeService(play), ServerSettings()) as server:
        assert post(server, path, **TEXTS[path], **CUT | {"truncation_side": "right"}).status_code == 200
        params = server.service.requests[-1].sampling["thinker"]
        assert (params.truncate_prompt_tokens, params.truncation_side) == (5, "right")
        wrong = post(server, path, **TEXTS[path], truncation_side="middle").json()["error"]
        assert (wrong["param"], "left or right" in wrong["message"]) == ("truncation_side", True)
