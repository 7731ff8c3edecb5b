"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from segue.messages.errors import InvalidRequest
from segue.orchestrator.service import Service
from segue.server.generation.parameters import served_names
from segue.server.http.body import check_names, convert, read_json
from segue.server.http.errors import Unsupported
from segue.server.settings import ServerSettings

_LONGEST = {"lora_name": 256, "lora_path": 4096}
"""Most characters; the limit of a path is Linux's."""


class LoadLoraBody(msgspec.Struct, kw_only=True):
    """A LoRA adapter, and the name that requests use as `model`."""

    lora_name: str
    lora_path: str
    """Its directory, on the server's machine."""


class UnloadLoraBody(msgspec.Struct, kw_only=True):
    """A loaded LoRA adapter."""

    lora_name: str


def add_lora(app: FastAPI, service: Service, settings: ServerSettings) -> None:
    """Add the endpoints."""

    async def body_of(http: Request) -> dict[str, object]:
        if not settings.allow_runtime_lora:
            raise Unsupported("this server loads no adapters while it runs: start it with --allow-runtime-lora")
        return await read_json(http, settings)

    @app.post("/v1/load_lora_adapter")
    async def load(http: Request) -> Response:
        values = await body_of(http)
        check_names(values, LoadLoraBody.__struct_fields__)
        body = convert(values, LoadLoraBody)
        _check_lengths(lora_name=body.lora_name, lora_path=body.lora_path)
        if body.lora_name in served_names(service.card, settings):
            raise InvalidRequest(f"lora_name is {body.lora_name!r}, a name of the model itself", field="lora_name")
        await service.load_lora(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(http: Request) -> Response:
        values = await body_of(http)
        check_names(values, UnloadLoraBody.__struct_fields__)
        body = convert(values, UnloadLoraBody)
        _check_lengths(lora_name=body.lora_name)
        await service.unload_lora(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_lengths(**given: str) -> None:
    """Raise `InvalidRequest` for an empty value, or one too long to repeat in a message."""
    for name, value in given.items():
        if not 0 < len(value) <= _LONGEST[name]:
            raise InvalidRequest(f"{name} has {len(value)} characters; it must have 1 to {_LONGEST[name]}", field=name)
