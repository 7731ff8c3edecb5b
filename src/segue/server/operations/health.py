"""Health, version and metrics endpoints.

`GET /health`: the stages' states, with 503 until every stage has a ready replica, then 200. `GET /ping`: the same,
under SageMaker's name. `GET /version`: as in vLLM. `GET /metrics`: the server's and all stages' metrics, for
Prometheus.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.http.errors import json_response

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_metrics(app: FastAPI, service: Service, own: ServerMetrics) -> None:
    """Add the endpoint."""

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(own.exposition() + service.metrics(), headers={"Content-Type": _CONTENT_TYPE})


def add_health(app: FastAPI, service: Service) -> None:
    """Add the endpoint."""

    @app.get("/version")
    async def own() -> Response:
        return json_response({"version": version("segue")})

    @app.get("/ping")
    @app.get("/health")
    async def report() -> Response:
        state = service.health()
        body: dict[str, Any] = {"model": service.card.name, **msgspec.to_builtins(state)}
        return json_response(body, 200 if state.ready else 503, None if state.ready else {"Retry-After": "1"})
