"""GET /health: 503 until every stage has a ready replica, then 200; the states either way. GET /ping: the same, as
SageMaker asks. GET /version: as vLLM has it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from segue.orchestrator.service import Service
from segue.server.errors import json_response


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
