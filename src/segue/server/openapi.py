"""GET /openapi.json: every endpoint, with the bodies' schemas made from their types."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from segue.server.chat_request import ChatBody
from segue.server.completion_request import CompletionBody
from segue.server.embeddings import EmbeddingsBody
from segue.server.errors import json_response
from segue.server.image_request import EditBody, ImageBody
from segue.server.lora import LoadLoraBody, UnloadLoraBody
from segue.server.message_request import CountBody, MessagesBody
from segue.server.pooling import ClassifyBody, PoolingBody
from segue.server.response_request import ResponsesBody
from segue.server.score_request import RerankBody, ScoreBody
from segue.server.tokenize import DetokenizeBody, TokenizeBody
from segue.server.transcription_request import TranscriptionBody, TranslationBody
from segue.server.video_request import VideoBody


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str
    stage: str | msgspec.UnsetType = msgspec.UNSET
    """Where a stage failed."""


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The answer to every request that fails."""

    error: ErrorObject


_POST: dict[str, tuple[type[msgspec.Struct] | None, str, bool]] = {
    "/v1/chat/completions": (ChatBody, "An answer to messages, whole or streamed.", True),
    "/v1/responses": (ResponsesBody, "An answer to items of a conversation, whole or streamed.", True),
    "/v1/responses/input_tokens": (ResponsesBody, "How many tokens the input of a response is.", False),
    "/v1/messages": (MessagesBody, "An answer to messages, as Anthropic has it, whole or streamed.", True),
    "/v1/messages/count_tokens": (CountBody, "How many tokens messages are.", False),
    "/v1/completions": (CompletionBody, "What a prompt goes on with, whole or streamed.", True),
    "/v1/embeddings": (EmbeddingsBody, "The vectors of texts.", False),
    **dict.fromkeys(("/v1/classify", "/classify"), (ClassifyBody, "What texts are, by the model's classes.", False)),
    **dict.fromkeys(("/v1/pooling", "/pooling"), (PoolingBody, "The vectors or classes of texts.", False)),
    **dict.fromkeys(("/v1/score", "/score"), (ScoreBody, "How well texts fit each other.", False)),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"), (RerankBody, "Documents, those that fit a query best first.", False)
    ),
    "/v1/images/generations": (ImageBody, "Pictures of a prompt, whole or streamed.", True),
    "/v1/images/edits": (EditBody, "Pictures made of others, whole or streamed.", True),
    "/v1/audio/transcriptions": (TranscriptionBody, "The text of a recording, whole or streamed.", True),
    "/v1/audio/translations": (TranslationBody, "The text of a recording in English, whole or streamed.", True),
    "/v1/videos": (VideoBody, "Begin to make a video.", False),
    "/v1/responses/{response_id}/cancel": (None, "End a response that is made in the background.", False),
    "/tokenize": (TokenizeBody, "A prompt or messages as token ids.", False),
    "/detokenize": (DetokenizeBody, "The text of token ids.", False),
    "/v1/load_lora_adapter": (LoadLoraBody, "Load a LoRA adapter.", False),
    "/v1/unload_lora_adapter": (UnloadLoraBody, "Unload a LoRA adapter.", False),
}
"""Path → (body, if any, what it gives, whether it can be streamed)."""
_GET = {
    "/v1/models": ("application/json", "What is served."),
    "/v1/models/{name}": ("application/json", "One model."),
    "/v1/responses/{response_id}": ("application/json", "A response that is kept, or its events."),
    "/v1/responses/{response_id}/input_items": ("application/json", "The items that a response answers."),
    "/v1/videos": ("application/json", "The videos of this server, made or being made."),
    "/v1/videos/{video_id}": ("application/json", "How a video stands."),
    "/v1/videos/{video_id}/content": ("video/mp4", "The file of a video."),
    "/v1/audio/voices": ("application/json", "Voices and audio formats."),
    "/tokenizer_info": ("application/json", "Special tokens and the chat template."),
    "/health": ("application/json", "Whether every stage is ready."),
    "/ping": ("application/json", "The same."),
    "/version": ("application/json", "Of this server."),
    "/metrics": ("text/plain", "Prometheus metrics."),
    "/openapi.json": ("application/json", "This document."),
    "/": ("text/html", "A page to try the model from."),
}


def add_openapi(app: FastAPI) -> None:
    """Add the endpoint. The document is made once."""
    document = _document()

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return json_response(document)


def _document() -> dict[str, Any]:
    bodies = [body for body, _, _ in _POST.values() if body is not None]
    _, components = msgspec.json.schema_components([*bodies, ErrorAnswer], ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"get": _get(path, *entry)} for path, entry in _GET.items()}
    for path, entry in _POST.items():
        paths.setdefault(path, {})["post"] = _post(path, *entry)
    for path, about in _DELETE.items():
        paths[path]["delete"] = _get(path, "application/json", about)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Segue", "version": version("segue")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(path: str, media: str, about: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": about, "responses": _answers({media: {}})}
    named = re.findall(r"{(\w+)}", path)
    if named or path in _QUERIES:
        operation["parameters"] = [_parameter(name, "path") for name in named] + [
            _parameter(name, "query") for name in _QUERIES.get(path, ())
        ]
    return operation


_PAGE = ("after", "limit", "order")
_QUERIES = {
    "/v1/responses/{response_id}": ("stream", "starting_after"),
    "/v1/responses/{response_id}/input_items": _PAGE,
    "/v1/videos": _PAGE,
    "/v1/videos/{video_id}/content": ("variant",),
}
_DELETE = {
    "/v1/responses/{response_id}": "Forget a response.",
    "/v1/videos/{video_id}": "End and forget a video.",
}
_FORMS = frozenset({"/v1/images/edits", "/v1/videos"})
"""What is also taken as a form."""
_FORMS_ALONE = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""What is taken as a form and no other way."""


def _post(path: str, body: type[msgspec.Struct] | None, about: str, streams: bool) -> dict[str, Any]:
    kinds: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        kinds["text/event-stream"] = {"schema": {"type": "string"}}
    form = ("multipart/form-data",) if path in _FORMS | _FORMS_ALONE else ()
    taken = (*(() if path in _FORMS_ALONE else ("application/json",)), *form)
    operation: dict[str, Any] = {"summary": about, "responses": _answers(kinds), "security": [{}, {"key": []}]}
    if body is not None:
        content = {one: {"schema": _reference(body)} for one in taken}
        operation["requestBody"] = {"required": True, "content": content}
    if named := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [_parameter(name, "path") for name in named]
    return operation


def _parameter(name: str, where: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}


def _answers(content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": _reference(ErrorAnswer)}}
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "An error.", "content": error},
    }


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
