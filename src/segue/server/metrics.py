"""GET /metrics: Prometheus, the server's own and everything of the stages."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_metrics(app: FastAPI, service: Service, own: ServerMetrics) -> None:
    """Add the endpoint."""

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(own.exposition() + service.metrics(), headers={"Content-Type": _CONTENT_TYPE})
