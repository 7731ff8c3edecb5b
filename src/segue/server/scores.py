"""POST /v1/score and /v1/rerank (and /score, /rerank, /v2/rerank): how well texts fit, as vLLM and Jina have it.

A model of embeddings scores a pair by the cosine of its two vectors, a cross-encoder by reading both texts together.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.messages.deltas import EmbeddingDelta, ScoreDelta
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.body import read_json
from segue.server.disconnect import while_connected
from segue.server.errors import json_response
from segue.server.pooled import pooled
from segue.server.score_request import RerankBody, Scoring, rerank_request, score_request
from segue.server.settings import ServerSettings


def add_scores(app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """Add the endpoints."""

    @app.post("/v1/score")
    @app.post("/score")
    async def score(request: HttpRequest) -> Response:
        asked = score_request(await read_json(request, settings), service.card, settings)
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
        asked, body = rerank_request(await read_json(request, settings), service.card, settings)
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
    """The best first; equal ones as they were given."""
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
    ones, used = await pooled(asked.singly(asked.firsts), EmbeddingDelta, first, service, metrics)
    others, more = await pooled(asked.singly(asked.seconds), EmbeddingDelta, second, service, metrics)
    return _cosines(_matrix(ones), _matrix(others)), used + more


def _matrix(vectors: list[EmbeddingDelta]) -> np.ndarray:
    """[texts, dimensions] float64, rows of length 1 (or 0)."""
    rows = np.stack([vector.array for vector in vectors]).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths == 0, 1, lengths)


def _cosines(ones: np.ndarray, others: np.ndarray) -> list[float]:
    """[1 or N, D] and [N, D] → N cosines."""
    return (ones * others).sum(axis=1).tolist()
