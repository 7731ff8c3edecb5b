"""POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import of_choices, run_generations
from segue.server.generation.usage import usage_object
from segue.server.http.body import read_json
from segue.server.http.checking import Checking
from segue.server.http.disconnect import EventStream, while_connected
from segue.server.http.errors import json_response
from segue.server.http.events import events
from segue.server.openai.chat.reply import WholeChoice
from segue.server.openai.chat.request import ChatRequest, chat_request, prompt_logprobs_object
from segue.server.openai.chat.stream import chat_chunks
from segue.server.settings import ServerSettings
from segue.server.vllm.parameters import NOTHING_OF_ANSWER, with_headers


def add_chat_completions(
    app: FastAPI, service: Service, settings: ServerSettings, metrics: ServerMetrics, checking: Checking
) -> None:
    """Add the endpoint."""

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        values = with_headers(await read_json(request, settings), request)
        chat = await checking.run(chat_request, values, service.card, settings)
        if chat.stream:
            deltas = run_generations(service, chat.requests, metrics, chat.written)
            return EventStream(events(chat_chunks(chat, deltas, service.card.text_stage)), settings.stall_seconds)
        return json_response(await while_connected(request.receive, _whole(chat, service, metrics)))


async def _whole(chat: ChatRequest, service: Service, metrics: ServerMetrics) -> dict[str, Any]:
    choices = [WholeChoice(index, chat) for index in range(chat.choices)]
    async with aclosing(run_generations(service, chat.requests, metrics, chat.written)) as deltas:
        async for index, whole in deltas:
            for place, delta in of_choices(index, whole, service.card.text_stage):
                choices[place].take(delta)
    answer: dict[str, Any] = {
        **NOTHING_OF_ANSWER,
        "id": chat.completion_id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.model,
        "choices": [choice.build() for choice in choices],
        "usage": usage_object(
            [choice.end for choice in choices], thought_tokens=sum(choice.thought_tokens for choice in choices)
        ),
        "prompt_token_ids": choices[0].prompt_token_ids if chat.return_token_ids else None,
        "prompt_logprobs": prompt_logprobs_object(choices[0].prompt_logprobs) if chat.wants_prompt_logprobs else None,
    }
    return answer
