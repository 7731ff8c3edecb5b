"""`GET /v1/models`, `/v1/models/{id}` and `/v1/audio/voices`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from segue.messages.errors import nearest, shown
from segue.messages.formats import AUDIO_FORMATS
from segue.orchestrator.service import ModelCard, Service
from segue.server.generation.parameters import served_names
from segue.server.http.errors import ModelNotFound, json_response
from segue.server.settings import ServerSettings


def add_models(app: FastAPI, service: Service, settings: ServerSettings) -> None:
    """Add the endpoints."""

    def served() -> tuple[str, ...]:
        return served_names(service.card, settings)

    @app.get("/v1/models")
    async def all_models() -> Response:
        data = [_object(name, service.card) for name in served()]
        data += [_adapter(name, served()[0], service.card) for name in service.card.adapters]
        return json_response({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name in service.card.adapters and name not in served():
            return json_response(_adapter(name, served()[0], service.card))
        if name not in served():
            known = (*served(), *service.card.adapters)
            raise ModelNotFound(f"model {shown(name)} is not served here{nearest(name, known)}", field="model")
        return json_response(_object(name, service.card))

    @app.get("/v1/audio/voices")
    async def voices() -> Response:
        card = service.card
        voices = card.voices or []
        formats = list(AUDIO_FORMATS) if "audio" in card.gives else []
        return json_response({"voices": voices, "default": next(iter(voices), None), "formats": formats})


def _adapter(name: str, parent: str, card: ModelCard) -> dict[str, Any]:
    """The object of a LoRA adapter, which clients see as a separate model."""
    return {**_object(name, card), "root": card.adapters[name], "parent": parent}


def _object(name: str, card: ModelCard) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "segue",
        "root": card.root or card.name,
        "parent": None,
        "family": card.family,
        "takes": sorted(card.takes),
        "gives": sorted(card.gives),
        "tensors": {
            name: {"dtype": spec.dtype, "shape": spec.shape, "tokens": spec.tokens, "most": spec.most}
            for name, spec in card.tensors.items()
        },
        "stages": card.stages,
        "sampling_stages": card.sampling_stages,
        "voices": card.voices or [],
        "options": sorted(card.options),
        "max_model_len": card.max_model_len,
    }
