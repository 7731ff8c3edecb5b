"""`POST /v1/score` and `/v1/rerank` (and `/score`, `/rerank`, `/v2/rerank`), as in vLLM, Jina and Cohere: how well
texts match.

An embedding model scores a pair by the cosine of its two vectors, a cross-encoder by reading both texts together.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.messages.deltas import EmbeddingDelta, ScoreDelta
from segue.messages.errors import InvalidRequest, shown, wrong
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import ModelCard, Service
from segue.server.generation.generations import deadline_of
from segue.server.generation.parameters import check_model, parse_body, turn_fields, with_model
from segue.server.generation.text_requests import cut_options, pooled
from segue.server.http.body import read_json
from segue.server.http.disconnect import while_connected
from segue.server.http.errors import Unsupported, json_response
from segue.server.settings import ServerSettings

_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""vLLM's names for the two sides of a score."""


class ScoringBody(msgspec.Struct, kw_only=True):
    """Parameters of both endpoints. null means not given."""

    model: str = ""
    use_activation: bool | None = None
    """Cross-encoders only: false returns raw logits."""
    truncate_prompt_tokens: int | None = None
    """Limit for a text, or for a pair if the model reads both together."""
    truncation_side: str | None = None
    user: str | None = None
    """The tenant, for fair scheduling."""
    priority: int | None = None
    deadline: float | None = None
    """Seconds from now."""


class ScoreBody(ScoringBody, kw_only=True):
    """Two sides: one text with each text of the other side, or texts in pairs."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class Document(msgspec.Struct, kw_only=True):
    """A document as an object."""

    text: str


class RerankBody(ScoringBody, kw_only=True):
    """A query and documents."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    """Return only the best `top_n`; 0 and null: all."""
    return_documents: bool | None = None
    """Jina's; true by default."""


_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "mm_processor_kwargs": ({},),
    "add_special_tokens": (True,),
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "rank_fields": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
"""Unsupported parameters of vLLM, Cohere and Jina → values that have no effect (null always does)."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A checked request: pair i is `firsts[i]` (`firsts[0]` if there is only one) with `seconds[i]`."""

    model: str
    firsts: list[str]
    seconds: list[str]
    fields: tuple[str, str]
    """The client's names of the two sides."""
    crossed: bool
    """The model reads both texts of a pair together; otherwise each becomes a vector."""
    options: dict[str, Any]
    turn: dict[str, Any]

    def singly(self, texts: list[str]) -> list[Request]:
        """A request for the vector of each text."""
        return [_request(text, ["embedding"], self.options, self.turn) for text in texts]

    def paired(self) -> list[Request]:
        """A request for the score of each pair."""
        firsts = self.firsts * len(self.seconds) if len(self.firsts) == 1 else self.firsts
        return [
            _request(first, ["score"], {**self.options, "text_pair": second}, self.turn)
            for first, second in zip(firsts, self.seconds, strict=True)
        ]


def _request(text: str, modalities: list[str], options: dict[str, Any], turn: dict[str, Any]) -> Request:
    request_id = f"score-{uuid.uuid4().hex}"
    return Request(request_id=request_id, prompt=text, modalities=modalities, options=options, **turn)


def score_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> Scoring:
    """Check the body. Raises `InvalidRequest` with parameter, value and remedy."""
    body = parse_body(with_model(values, card, settings), ScoreBody, _UNSUPPORTED, {})
    read = msgspec.structs.asdict(body)
    given = tuple(name for name in dict.fromkeys(sum(_SIDES, ())) if read[name] is not None)
    if given not in _SIDES:
        right = "; or ".join(" and ".join(side) for side in _SIDES)
        has = f"given: {' and '.join(given)}" if given else "no texts are given"
        raise InvalidRequest(f"{has}; give {right}", field=given[-1] if given else "text_1")
    first, second = given
    firsts, seconds = _texts(read[first], first), _texts(read[second], second)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"{first} has {len(firsts)} texts and {second} {len(seconds)}; {first} must have one, or as many",
            field=first,
        )
    return _scoring(body, firsts, seconds, (first, second), card, settings)


def rerank_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> tuple[Scoring, RerankBody]:
    """Check the body. Raises `InvalidRequest` with parameter, value and remedy."""
    body = parse_body(with_model(values, card, settings), RerankBody, _UNSUPPORTED, {})
    if body.top_n is not None and body.top_n < 0:
        raise wrong("top_n", body.top_n, "at least 1, or 0 for all")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    checked = _texts(documents, "documents")
    return _scoring(body, [body.query], checked, ("query", "documents"), card, settings), body


def _texts(given: str | list[str], field: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise InvalidRequest(f"{field} is empty; give at least one text", field=field)
    return texts


def _scoring(
    body: ScoringBody,
    firsts: list[str],
    seconds: list[str],
    fields: tuple[str, str],
    card: ModelCard,
    settings: ServerSettings,
) -> Scoring:
    check_model(body.model, card, settings)
    if card.gives.isdisjoint(("embedding", "score")):
        raise Unsupported(
            f"model {shown(body.model)} gives neither scores nor embeddings (it gives "
            f"{', '.join(sorted(card.gives))}); scores need an embedding model or a cross-encoder",
            field="model",
        )
    crossed = "score" in card.gives
    if body.use_activation is False and not crossed:
        raise Unsupported(
            "use_activation is False; an embedding model has no activation, its score is a cosine: leave it out",
            field="use_activation",
        )
    return Scoring(
        model=body.model,
        firsts=firsts,
        seconds=seconds,
        fields=fields,
        crossed=crossed,
        options={
            **({"use_activation": body.use_activation} if crossed and body.use_activation is not None else {}),
            **cut_options(body, card),
        },
        turn=turn_fields(body.priority, body.user, body.deadline, time.time(), card),
    )


def add_scores(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """Add the endpoints."""

    @app.post("/v1/score")
    @app.post("/score")
    async def score(request: HttpRequest) -> Response:
        values = await read_json(request, settings)
        asked = await asyncio.to_thread(score_request, values, service.card, settings)
        scores, tokens = await while_connected(request.receive, _scores(asked, service, metrics))
        return json_response(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": asked.model,
                "data": [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)],
                "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
            }
        )

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(request: HttpRequest) -> Response:
        values = await read_json(request, settings)
        asked, body = await asyncio.to_thread(rerank_request, values, service.card, settings)
        scores, tokens = await while_connected(request.receive, _scores(asked, service, metrics))
        return json_response(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": asked.model,
                "results": _ranked(asked.seconds, scores, body),
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )


def _ranked(documents: list[str], scores: list[float], body: RerankBody) -> list[dict[str, Any]]:
    """The results, best first; equal scores in the given order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in order[: body.top_n or None]:
        shown = {} if body.return_documents is False else {"document": {"text": documents[index]}}
        results.append({"index": index, **shown, "relevance_score": scores[index]})
    return results


async def _scores(asked: Scoring, service: Service, metrics: ServerMetrics) -> tuple[list[float], int]:
    """(a score per pair, prompt tokens of all texts)."""
    first, second = asked.fields
    if asked.crossed:
        scores, tokens = await pooled(asked.paired(), ScoreDelta, second, service, metrics)
        return [one.score for one in scores], tokens
    due = deadline_of(service)  # one deadline for both sides
    sides = asked.singly(asked.firsts), asked.singly(asked.seconds)
    for request in (*sides[0], *sides[1]):
        request.deadline = request.deadline or due
    ones, used = await pooled(sides[0], EmbeddingDelta, first, service, metrics)
    others, more = await pooled(sides[1], EmbeddingDelta, second, service, metrics)
    return _cosines(_matrix(ones), _matrix(others)), used + more


def _matrix(vectors: list[EmbeddingDelta]) -> np.ndarray:
    """[texts, dimensions] float64, rows of length 1 (or 0)."""
    rows = np.stack([vector.array for vector in vectors]).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths == 0, 1, lengths)


def _cosines(ones: np.ndarray, others: np.ndarray) -> list[float]:
    """[1 or N, D] and [N, D] → N cosines."""
    return (ones * others).sum(axis=1).tolist()
