"""`POST /tokenize` and `/detokenize`, `GET /tokenizer_info`, as in vLLM: prompts to tokens and back.

The tokenizer is in the input stage; these are requests that end there.
"""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from segue.graph.parts import TOKENS
from segue.messages.deltas import TokensDelta
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.messages.request import Request
from segue.models.shared.text.chat_template import SPECIAL_TOKENS
from segue.orchestrator.service import ModelCard, Service
from segue.orchestrator.tokenless import refusal
from segue.server.generation.generations import deadline_of
from segue.server.generation.parameters import as_written, check_model, checked_token_ids
from segue.server.http.body import check_names, check_unsupported, convert, read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import while_connected
from segue.server.http.errors import Unsupported, json_response
from segue.server.openai.chat.request import ChatRequest, Messages, checked_messages
from segue.server.openai.chat.template import chat_options, dialect_for
from segue.server.openai.chat.tools import Tool, tool_plan
from segue.server.settings import ServerSettings


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A prompt, or messages for the chat template. null means not given."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
"""Unsupported parameters of vLLM's → values that have no effect (null always does)."""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


def add_tokenize(app: FastAPI, service: Service, settings: ServerSettings, checking: Checking) -> None:
    """Add the endpoints."""

    @app.post("/tokenize")
    async def tokenize(http: HttpRequest) -> Response:
        values = await read_json(http, settings)
        fields = TokenizeBody.__struct_fields__
        check_names(values, {*fields, *_UNSUPPORTED}, offered=fields)
        check_unsupported(values, _UNSUPPORTED)
        body = convert(values, TokenizeBody)
        request = await checking.run(_tokenize_request, body, values, service.card, settings)
        found = await while_connected(http.receive, prompt_tokens(service, request))
        answer = {
            "count": len(found.token_ids),
            "max_model_len": service.card.max_model_len,
            "tokens": found.token_ids,
            "token_strs": found.token_strs if body.return_token_strs else None,
        }
        return json_response(answer)

    @app.post("/detokenize")
    async def detokenize(http: HttpRequest) -> Response:
        values = await read_json(http, settings)
        check_names(values, DetokenizeBody.__struct_fields__)
        body = convert(values, DetokenizeBody)
        if body.model is not None:
            check_model(body.model, service.card, settings)
        if not service.card.tokenizer:
            raise refusal("tokens", "cannot be made text", "decode them yourself")
        if not body.tokens:
            return json_response({"prompt": ""})
        card = service.card
        ids = checked_token_ids(body.tokens, "tokens", card.vocab_sizes.get(card.text_stage or ""))
        found = await while_connected(http.receive, prompt_tokens(service, _request(prompt_token_ids=ids)))
        if not found.token_strs:
            raise InvalidRequest("this checkpoint has no tokenizer, so its ids have no text", field="tokens")
        return json_response({"prompt": found.text})

    @app.get("/tokenizer_info")
    async def info() -> Response:
        dialect = service.card.dialect
        special = dict(dialect.special_tokens)
        template = dialect.template.text if dialect.template is not None else None
        tokens = {name: special.get(name) for name in SPECIAL_TOKENS}
        return json_response({"tokenizer_class": dialect.tokenizer_class, **tokens, "chat_template": template})


def _tokenize_request(body: TokenizeBody, values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> Request:
    """Convert the body. Blocking (media)."""
    if body.model is not None:
        check_model(body.model, card, settings)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", field="prompt" if body.prompt is None else "messages")
    if body.prompt is not None:
        return _request(prompt=body.prompt, add_special_tokens=body.add_special_tokens)
    dialect = dialect_for(card, settings)
    tools = tool_plan(body.tools, None, None, values.get("tools"), dialect)
    return _request(
        messages=checked_messages(body.messages, card, settings),
        chat=chat_options(body, dialect, tools),
        add_special_tokens=body.add_special_tokens,
    )


def _request(**prompt: Any) -> Request:
    return Request(request_id=f"tokens-{uuid.uuid4().hex}", modalities=[TOKENS], **prompt)


async def count_prompt(http: HttpRequest, service: Service, chat: ChatRequest) -> int:
    """Number of tokens in a chat completion's prompt. Raises `SegueError` with the client's names."""
    prompt = msgspec.structs.replace(chat.requests[0], modalities=[TOKENS], return_prompt_ids=False)
    try:
        found = await while_connected(http.receive, prompt_tokens(service, prompt))
    except SegueError as error:
        raise as_written(error, chat.written) from error
    return len(found.token_ids)


async def prompt_tokens(service: Service, request: Request) -> TokensDelta:
    """The result of a request of the modality `tokens` alone. Raises `Unsupported` for a model without ids."""
    found: TokensDelta | None = None
    request.deadline = request.deadline or deadline_of(service)
    async with aclosing(service.stream(request)) as deltas:
        async for delta in deltas:  # to the end, so that the request is not cancelled
            if isinstance(delta, TokensDelta):
                found = delta
    if found is None and "text" not in service.card.gives:
        raise Unsupported("this model has no token ids: it makes no text", field="model")
    if found is None:
        raise StageFailed("the input stage gave no tokens")
    return found
