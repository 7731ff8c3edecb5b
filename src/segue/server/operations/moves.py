"""`POST /v1/move_worker`: an operator moves a worker from one stage to another."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.orchestrator.service import Service
from segue.server.http.body import check_names, convert, read_json
from segue.server.http.errors import Forbidden, Unsupported, json_response
from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import calling


class MoveWorkerBody(msgspec.Struct, kw_only=True):
    """Stages by name; of stages that share a worker, any."""

    from_stage: str
    to_stage: str


def add_moves(app: FastAPI, service: Service, settings: ServerSettings) -> None:
    """Add the endpoint."""

    @app.post("/v1/move_worker")
    async def move(http: Request) -> Response:
        if not settings.allow_moves:
            raise Unsupported("this server moves no workers on command: start it with --allow-moves")
        if not calling.get().account.tenant.operator:
            raise Forbidden("the key is no operator's: set `operator: true` for its tenant")
        values = await read_json(http, settings)
        check_names(values, MoveWorkerBody.__struct_fields__)
        body = convert(values, MoveWorkerBody)
        return json_response(msgspec.to_builtins(await service.move_worker(body.from_stage, body.to_stage)))
