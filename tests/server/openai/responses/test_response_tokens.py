"""POST /v1/responses/input_tokens: how many tokens an input is, for which nothing is made and nothing is kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import openai
import pytest
from calling_model import LOOK
from fake_service import Live, speak

from segue.messages.deltas import Delta
from segue.messages.errors import TooLong
from segue.messages.request import Request

NAME = "fake-omni"


def count_of(text: str, server: Live) -> None:
    """Let the prompt be a token per letter of `text`."""

    async def counted(request: Request) -> AsyncGenerator[Delta]:
        async for delta in speak(msgspec.structs.replace(request, prompt=text)):
            yield delta

    server.service.script = counted


@pytest.mark.usefixtures("calling")
def test_tokens_are_counted(client: openai.OpenAI, server: Live) -> None:
    count_of("abcde", server)
    counted = client.responses.input_tokens.count(model=NAME, input="Hello", instructions="Be brief.", tools=[LOOK])
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 5)
    [request] = server.service.requests
    assert request.modalities == ["tokens"]
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.chat.tools


def test_the_conversation_so_far_is_counted(client: openai.OpenAI, server: Live) -> None:
    first = client.responses.create(model=NAME, input="Hello")
    count_of("abc", server)
    counted = client.responses.input_tokens.count(model=NAME, input="And?", previous_response_id=first.id)
    assert counted.input_tokens == 3
    assert [message.role for message in server.service.requests[-1].messages] == ["user", "assistant", "user"]
    with pytest.raises(openai.NotFoundError, match="resp_nobody") as unknown:
        client.responses.input_tokens.count(model=NAME, input="And?", previous_response_id="resp_nobody")
    assert unknown.value.param == "previous_response_id"


def test_what_is_refused_is_named(client: openai.OpenAI, server: Live) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.input_tokens.count(model=NAME, input=[])
    assert wrong.value.param == "input"

    async def too_long(request: Request) -> AsyncGenerator[Delta]:
        raise TooLong("the prompt has 9 tokens", field="messages")
        yield

    server.service.script = too_long
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.input_tokens.count(model=NAME, input="Hello")
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
