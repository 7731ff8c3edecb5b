"""Responses that are kept on the server, and conversations that go on from them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from calling_model import LOOK, THOUGHT_AND_CALLS, WAIT, says, told
from fake_service import FakeService, Live, live

from segue.server.settings import ServerSettings

pytestmark = pytest.mark.usefixtures("calling")
NAME = "fake-omni"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(client: openai.OpenAI, server: Live, stream: bool) -> None:
    def ask(text: str, **more: Any) -> Any:
        if not stream:
            return client.responses.create(model=NAME, input=text, **more)
        *_, last = client.responses.create(model=NAME, input=text, stream=True, **more)
        return last.response  # type: ignore[union-attr]

    first = ask("One", instructions="Be brief.")
    second = ask("Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert told(server) == [("user", "One"), ("assistant", "Hello, world"), ("user", "Two")]
    client.responses.delete(first.id)
    ask("Three", previous_response_id=second.id)
    assert told(server) == [
        ("user", "One"), ("assistant", "Hello, world"), ("user", "Two"), ("assistant", "Hello, world"),
        ("user", "Three"),
    ]  # fmt: skip
    assert client.responses.retrieve(second.id).output_text == "Hello, world"
    with pytest.raises(openai.NotFoundError, match="which is not stored"):
        ask("Four", previous_response_id=first.id)


def test_a_call_is_answered_from_what_is_kept(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says(THOUGHT_AND_CALLS)
    first = client.responses.create(model=NAME, input="What is at sea?", tools=[LOOK, WAIT])
    call = first.output[2]
    assert call.type == "function_call"
    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a ship"}
    client.responses.create(model=NAME, input=[answer], previous_response_id=first.id)
    messages = server.service.requests[-1].messages
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert messages[1].extra["reasoning_content"] == "Hm."
    assert [call["function"]["name"] for call in messages[1].extra["tool_calls"]] == ["look", "wait"]


def test_what_is_not_to_be_kept(client: openai.OpenAI, server: Live) -> None:
    reply = client.responses.create(model=NAME, input="a", store=False)
    assert reply.store is False
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="which is not stored here"):
            call(reply.id)


def test_a_response_that_has_ended_cannot_be_cancelled(client: openai.OpenAI, server: Live) -> None:
    reply = client.responses.create(model=NAME, input="a")
    with pytest.raises(openai.BadRequestError, match="was not made in the background"):
        client.responses.cancel(reply.id)
    with pytest.raises(openai.BadRequestError, match="the server stores events only of background responses"):
        client.responses.retrieve(reply.id, stream=True)


def test_the_oldest_make_room() -> None:
    settings = ServerSettings(max_responses=2, drain_seconds=1)
    with (
        live(FakeService(), settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        ids = [client.responses.create(model=NAME, input="a").id for _ in range(3)]
        assert [client.responses.retrieve(name).id for name in ids[1:]] == ids[1:]
        with pytest.raises(openai.NotFoundError, match="this server stores 2"):
            client.responses.retrieve(ids[0])
