"""`GET /openapi.json`: every endpoint, with schemas generated from the types of bodies and answers."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from segue.messages.formats import AUDIO_FORMATS
from segue.server.anthropic.request import CountBody, MessagesBody
from segue.server.http.errors import MESSAGES, json_response
from segue.server.http.middleware import OPEN
from segue.server.openai.audio.request import TranscriptionBody, TranslationBody
from segue.server.openai.audio.speech_request import SpeechBody, SpeechOptions
from segue.server.openai.chat.request import ChatBody
from segue.server.openai.completions.request import CompletionBody
from segue.server.openai.embeddings import EmbeddingsBody
from segue.server.openai.images.request import EditBody, ImageBody
from segue.server.openai.responses.request import ResponsesBody
from segue.server.openai.videos.request import VideoBody
from segue.server.operations.answers import anthropic, chat, media, responses, server, texts
from segue.server.operations.moves import MoveWorkerBody
from segue.server.vllm.lora import LoadLoraBody, UnloadLoraBody
from segue.server.vllm.pooling import ClassifyBody, PoolingBody
from segue.server.vllm.scores import RerankBody, ScoreBody
from segue.server.vllm.tokenize import DetokenizeBody, TokenizeBody


class ErrorObject(msgspec.Struct, kw_only=True):
    """An error, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str
    stage: str | msgspec.UnsetType = msgspec.UNSET
    """The stage that failed, if any."""


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The answer to every failed request."""

    error: ErrorObject


class AnthropicError(msgspec.Struct, kw_only=True):
    """An error, in Anthropic's form."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True):
    """The answer to every failed request, on Anthropic's endpoints."""

    type: Literal["error"]
    error: AnthropicError


class Post(NamedTuple):
    """An endpoint that takes a body."""

    about: str
    body: type[msgspec.Struct] | None
    answer: Any
    """A type of `answers`, or media types."""
    event: Any = None
    """Type of a stream's events."""


_CLASSIFY = Post("Classify texts.", ClassifyBody, texts.ClassifyAnswer)
_POOLING = Post("Vectors or class probabilities of texts.", PoolingBody, texts.PoolingAnswer)
_SCORE = Post("Scores of how well texts match.", ScoreBody, texts.ScoreAnswer)
_SPEECH = ("audio/mpeg", *sorted(set(AUDIO_FORMATS.values()) - {"audio/mpeg"}))
_RERANK = Post("Documents ranked by how well they match a query.", RerankBody, texts.RerankAnswer)
POST: dict[str, Post] = {
    "/v1/chat/completions": Post(
        "An answer to messages, whole or streamed.", ChatBody, chat.ChatAnswer, chat.ChatChunk
    ),
    "/v1/responses": Post(
        "An answer to items of a conversation, whole or streamed.",
        ResponsesBody,
        responses.ResponseAnswer,
        responses.ResponseEvent,
    ),
    "/v1/responses/input_tokens": Post("Count the tokens of a response's input.", ResponsesBody, responses.InputTokens),
    "/v1/messages": Post(
        "An answer to messages, in Anthropic's format, whole or streamed.",
        MessagesBody,
        anthropic.MessageAnswer,
        anthropic.MessageEvent,
    ),
    "/v1/messages/count_tokens": Post("Count the tokens of messages.", CountBody, anthropic.CountedTokens),
    "/v1/completions": Post(
        "A continuation of a prompt, whole or streamed.",
        CompletionBody,
        chat.CompletionAnswer,
        chat.CompletionChunk,
    ),
    "/v1/embeddings": Post("Embedding vectors of texts.", EmbeddingsBody, texts.EmbeddingsAnswer),
    **dict.fromkeys(("/v1/classify", "/classify"), _CLASSIFY),
    **dict.fromkeys(("/v1/pooling", "/pooling"), _POOLING),
    **dict.fromkeys(("/v1/score", "/score"), _SCORE),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RERANK),
    "/v1/images/generations": Post(
        "Images from a prompt, whole or streamed.", ImageBody, media.ImagesAnswer, media.ImageEvent
    ),
    "/v1/images/edits": Post(
        "Images made from others, whole or streamed.", EditBody, media.ImagesAnswer, media.ImageEvent
    ),
    "/v1/audio/speech": Post("The speech of a text, streamed.", SpeechBody, _SPEECH, media.SpeechEvent),
    "/v1/audio/transcriptions": Post(
        "The text of a recording, whole or streamed.",
        TranscriptionBody,
        media.Transcription,
        media.TranscriptEvent,
    ),
    "/v1/audio/translations": Post(
        "The text of a recording in English, whole or streamed.",
        TranslationBody,
        media.Transcription,
        media.TranscriptEvent,
    ),
    "/v1/videos": Post("Start a video job.", VideoBody, media.VideoJob),
    "/v1/responses/{response_id}/cancel": Post("Cancel a background response.", None, responses.ResponseAnswer),
    "/tokenize": Post("A prompt or messages as token ids.", TokenizeBody, server.Tokens),
    "/detokenize": Post("The text of token ids.", DetokenizeBody, server.Detokenized),
    "/v1/load_lora_adapter": Post("Load a LoRA adapter.", LoadLoraBody, "text/plain"),
    "/v1/move_worker": Post("Move a worker from one stage to another.", MoveWorkerBody, server.MovedWorker),
    "/v1/unload_lora_adapter": Post("Unload a LoRA adapter.", UnloadLoraBody, "text/plain"),
}
GET: dict[str, tuple[Any, str]] = {
    "/v1/models": (server.Models, "The served models."),
    "/v1/models/{name}": (server.Model, "One model."),
    "/v1/responses/{response_id}": (responses.ResponseAnswer, "A stored response, or its events."),
    "/v1/responses/{response_id}/input_items": (responses.Listed, "The input items of a response."),
    "/v1/videos": (responses.Listed, "The video jobs of this server."),
    "/v1/videos/{video_id}": (media.VideoJob, "The state of a video job."),
    "/v1/videos/{video_id}/content": ("video/mp4", "The file of a video."),
    "/v1/audio/voices": (server.Voices, "Voices and audio formats."),
    "/tokenizer_info": (server.TokenizerInfo, "Special tokens and the chat template."),
    "/health": (server.HealthAnswer, "Whether every stage is ready."),
    "/ping": (server.HealthAnswer, "The same."),
    "/version": (server.Version, "The server's version."),
    "/metrics": ("text/plain", "Prometheus metrics."),
    "/openapi.json": ("application/json", "This document."),
    "/": ("text/html", "A page to try the model from."),
    "/page/examples": (server.Examples, "The model's own examples, which the page offers."),
}
"""Path → (a type of `answers`, or a media type; description)."""
_PAGE = ("after", "limit", "order")
_QUERIES = {
    "/v1/responses/{response_id}": ("stream", "starting_after"),
    "/v1/responses/{response_id}/input_items": _PAGE,
    "/v1/videos": _PAGE,
    "/v1/videos/{video_id}/content": ("variant",),
    "/v1/audio/speech": SpeechOptions.__struct_fields__,
}
_DELETE = {
    "/v1/responses/{response_id}": "Delete a response.",
    "/v1/videos/{video_id}": "End and delete a video job.",
}
_WEBSOCKETS = {
    "/v1/audio/speech/stream": "A websocket that says texts while they are written.",
    "/v1/chat/completions/stream": "A websocket with a completion whose input is appended while it runs.",
}
"""Path → description. OpenAPI has a websocket's handshake: a GET, answered with 101."""
_FORMS = frozenset({"/v1/images/edits", "/v1/videos"})
"""Endpoints that also take a form."""
_FORMS_ALONE = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Endpoints that take only a form."""
_TEXTS = frozenset({"/v1/audio/speech"})
"""Endpoints that also take a text, with the parameters in the query."""


def add_openapi(app: FastAPI) -> None:
    """Add the endpoint. The document is generated once."""
    document = _document()

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return json_response(document)


def _document() -> dict[str, Any]:
    kinds = [kind for post in POST.values() for kind in (post.body, post.answer, post.event)]
    kinds += [kind for kind, _ in GET.values()] + [responses.Deleted, ErrorAnswer, AnthropicErrorAnswer]
    named = [kind for kind in dict.fromkeys(kinds) if isinstance(kind, type)]
    _, components = msgspec.json.schema_components(named, ref_template="#/components/schemas/{name}")
    # with_one_name: OpenAI calls the images `image` in a form and `images` in JSON
    edit = components["EditBody"]
    edit["properties"]["images"] = {"type": "array", "items": edit["properties"]["image"]["anyOf"][0]}
    edit["required"] = [name for name in edit["required"] if name != "image"]
    edit["anyOf"] = [{"required": ["image"]}, {"required": ["images"]}]
    paths: dict[str, Any] = {path: {"get": _get(path, *entry)} for path, entry in GET.items()}
    for path, entry in POST.items():
        paths.setdefault(path, {})["post"] = _post(path, entry)
    for path, about in _DELETE.items():
        paths[path]["delete"] = _operation(path, about, _content(responses.Deleted))
    for path, about in _WEBSOCKETS.items():
        handshake = _operation(path, about, {})
        handshake["responses"]["101"] = {"description": "The websocket is open."}
        del handshake["responses"]["200"]
        paths[path] = {"get": handshake}
    content = "/v1/videos/{video_id}/content"
    head = {"200": {"description": "The headers of the answer to GET."}, "default": {"description": "An error."}}
    paths[content]["head"] = {**paths[content]["get"], "summary": "The size of the file.", "responses": head}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Segue", "version": version("segue")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _get(path: str, answer: Any, about: str) -> dict[str, Any]:
    content = _content(answer)
    if "stream" in _QUERIES.get(path, ()):
        content |= _events(POST["/v1/responses"].event)
    return _operation(path, about, content, _QUERIES.get(path, ()))


def _post(path: str, post: Post) -> dict[str, Any]:
    content = _content(post.answer) | ({} if post.event is None else _events(post.event))
    operation = _operation(path, post.about, content, _QUERIES.get(path, ()) if path in _TEXTS else ())
    if post.body is not None:
        form = ("multipart/form-data",) if path in _FORMS | _FORMS_ALONE else ()
        taken = (*(() if path in _FORMS_ALONE else ("application/json",)), *form)
        operation["requestBody"] = {
            "required": True,
            "content": {one: {"schema": _reference(post.body)} for one in taken},
        }
    if path in _TEXTS:
        operation["requestBody"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    return operation


def _operation(path: str, about: str, content: dict[str, Any], queries: tuple[str, ...] = ()) -> dict[str, Any]:
    error = AnthropicErrorAnswer if path.startswith(MESSAGES) else ErrorAnswer
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "An error.", "content": _content(error)},
        },
    }
    if path not in OPEN:  # {}: also allowed without a key, if the server has none
        operation["security"] = [{}, {"key": []}, *([{"x-api-key": []}] if path.startswith(MESSAGES) else [])]
    parameters = [_parameter(name, "path") for name in re.findall(r"{(\w+)}", path)]
    parameters += [_parameter(name, "query") for name in queries]
    return operation | ({"parameters": parameters} if parameters else {})


def _parameter(name: str, where: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}


def _content(answer: Any) -> dict[str, Any]:
    if isinstance(answer, tuple):
        return {kind: entry for one in answer for kind, entry in _content(one).items()}
    if isinstance(answer, str):
        return {answer: {"schema": {"type": "object" if answer == "application/json" else "string"}}}
    return {"application/json": {"schema": _reference(answer)}}


def _events(event: Any) -> dict[str, Any]:
    """The content of a stream. OpenAPI 3.1 has no schema for a stream's events; JSON Schema has one for JSON inside a
    string."""
    about = "Server-sent events. The data of each is JSON of contentSchema; if events have no name, [DONE] is the last."
    inner = {"contentMediaType": "application/json", "contentSchema": _reference(event)}
    return {"text/event-stream": {"schema": {"type": "string", "description": about, **inner}}}


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
