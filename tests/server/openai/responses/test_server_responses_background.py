"""Responses that are made in the background, driven by the official client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from fake_service import FakeService, Gate, Live, finished, live, sent, speak

from segue.messages.deltas import Delta, TextDelta
from segue.messages.errors import InvalidRequest, Overloaded, StageFailed
from segue.messages.request import Request
from segue.server.openai.responses.background import AT_ONCE
from segue.server.settings import ServerSettings

NAME = "fake-omni"


def in_parts(gate: Gate) -> Any:
    """A script that says a word, waits at the gate, and says another."""

    async def script(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "Hel", [1])
        await gate.wait()
        yield TextDelta("thinker", "lo", [2])
        yield finished()

    return script


def create(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(model=NAME, input="Hello", background=True, **more)


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """It, once it has ended: its events say when."""
    for _ in client.responses.retrieve(response_id, stream=True):
        pass
    return client.responses.retrieve(response_id)


def test_it_is_polled(client: openai.OpenAI, server: Live) -> None:
    gate = Gate()
    server.service.script = in_parts(gate)
    first = create(client, instructions="Be brief.")
    assert (first.status, first.background, first.output, first.completed_at) == ("queued", True, [], None)
    assert gate.reached.wait(120)
    second = client.responses.retrieve(first.id)
    assert (second.status, second.output, second.usage) == ("in_progress", [], None)
    gate.open()
    third = ended(client, first.id)
    assert (third.status, third.output_text, third.instructions) == ("completed", "Hello", "Be brief.")
    assert third.usage is not None
    assert third.usage.total_tokens == 15
    assert [request.request_id for request in server.service.requests] == [first.id]
    following = client.responses.create(model=NAME, input="On.", previous_response_id=first.id)
    assert following.status == "completed"
    assert [message.role for message in server.service.requests[-1].messages] == ["user", "assistant", "user"]


def test_its_events_are_joined_and_joined_again(client: openai.OpenAI, server: Live) -> None:
    gate = Gate()
    server.service.script = in_parts(gate)
    with create(client, stream=True) as stream:
        seen = [next(stream) for _ in range(6)]
    assert [event.type.removeprefix("response.") for event in seen] == [
        "created", "queued", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
    ]  # fmt: skip
    assert [event.sequence_number for event in seen] == list(range(6))
    assert (seen[0].response.status, seen[2].response.status) == ("queued", "in_progress")
    # that client is gone, and nobody listens; now another one comes
    name = seen[0].response.id
    with client.responses.retrieve(name, stream=True, starting_after=3) as again:
        early = [next(again), next(again)]
        assert [event.type for event in early] == [event.type for event in seen[4:]]
        gate.open()
        rest = list(again)
    assert [event.sequence_number for event in (*early, *rest)] == list(range(4, 6 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == "Hello"
    whole = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in whole] == [event.to_dict() for event in (*seen, *rest)]
    assert list(client.responses.retrieve(name, stream=True, starting_after=rest[-1].sequence_number)) == []
    with client.responses.stream(response_id=name, starting_after=0) as helper:
        assert "".join(event.delta for event in helper if event.type == "response.output_text.delta") == "Hello"
    assert server.service.cancelled.empty()


def test_a_client_that_leaves_at_once_ends_nothing(client: openai.OpenAI, server: Live) -> None:
    gate = Gate()
    server.service.script = in_parts(gate)
    with sent(server.port, "/v1/responses", {"model": NAME, "input": "a", "background": True, "stream": True}):
        assert gate.reached.wait(120)
    gate.open()
    assert ended(client, server.service.requests[-1].request_id).status == "completed"


def test_it_is_cancelled(client: openai.OpenAI, server: Live) -> None:
    gate = Gate()
    server.service.script = in_parts(gate)
    with create(client, stream=True) as stream:
        name = next(stream).response.id
        assert gate.reached.wait(120)
        cancelled = client.responses.cancel(name)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
        assert cancelled.output[0].status == "incomplete"  # type: ignore[union-attr]
        *_, last = stream
    assert last.type == "response.cancelled"
    assert server.service.cancelled.get(timeout=120) == name
    assert client.responses.cancel(name) == client.responses.retrieve(name) == cancelled
    with pytest.raises(openai.BadRequestError, match="whose status is cancelled"):
        client.responses.create(model=NAME, input="On.", previous_response_id=name)
    server.service.script = speak
    done = ended(client, create(client).id)
    assert client.responses.cancel(done.id) == done


def test_it_is_deleted_while_it_is_made(client: openai.OpenAI, server: Live) -> None:
    gate = Gate()
    server.service.script = in_parts(gate)
    name = create(client).id
    assert gate.reached.wait(120)
    client.responses.delete(name)
    assert server.service.cancelled.get(timeout=120) == name
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(name)


def test_what_goes_wrong_is_its_end(client: openai.OpenAI, server: Live) -> None:
    async def breaks(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "Hel", [1])
        raise StageFailed("the card is on fire")

    async def refuses(request: Request) -> AsyncGenerator[Delta]:
        raise InvalidRequest("input is too sad", field="input")
        yield finished()

    async def stumbles(request: Request) -> AsyncGenerator[Delta]:
        raise ZeroDivisionError("secret")
        yield finished()

    for script, code, text, output in (
        (breaks, "server_error", "the card is on fire", "Hel"),
        (refuses, "invalid_prompt", "input is too sad", ""),
        (stumbles, "server_error", "internal error; the server's log has it", ""),
    ):
        server.service.script = script
        failed = ended(client, create(client).id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert (failed.error.code, failed.output_text) == (code, output)
        assert text in failed.error.message
        assert "secret" not in failed.error.message
        *_, last = client.responses.retrieve(failed.id, stream=True)
        assert last.type == "response.failed"


def test_a_full_system_is_waited_for(client: openai.OpenAI, server: Live) -> None:
    tries = iter(range(9))

    async def full_at_first(request: Request) -> AsyncGenerator[Delta]:
        if next(tries) < 3:
            raise Overloaded("full")
        yield TextDelta("thinker", "Hello", [1])
        yield finished()

    server.service.script = full_at_first
    assert ended(client, create(client).id).output_text == "Hello"
    assert len(server.service.requests) == 4


def test_some_at_a_time(client: openai.OpenAI, server: Live) -> None:
    """More than those wait, in order, and can be cancelled meanwhile."""
    gate = Gate()
    server.service.script = in_parts(gate)
    names = [create(client).id for _ in range(AT_ONCE)]
    waiting = [create(client).id for _ in range(2)]
    assert gate.reached.wait(120)
    assert client.responses.cancel(waiting[0]).status == "cancelled"
    assert client.responses.retrieve(waiting[1]).status == "queued"
    assert len(server.service.requests) == AT_ONCE
    gate.open()
    assert [ended(client, name).status for name in (*names, waiting[1])] == ["completed"] * (AT_ONCE + 1)
    assert waiting[0] not in {request.request_id for request in server.service.requests}


def test_the_items_that_it_answers(client: openai.OpenAI, server: Live) -> None:
    first = client.responses.create(model=NAME, input="One")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Two"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a ship", "id": "own"},
        {"role": "assistant", "content": "Three"},
    ]
    name = client.responses.create(model=NAME, input=items, previous_response_id=first.id, background=True).id
    found = list(client.responses.input_items.list(name, order="asc", limit=2))  # page by page
    assert [item.type for item in found] == [
        "message", "message", "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    texts = [item.content[0].text for item in found if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["One", "Hello, world", "Two", "Three"]
    assert found[1].id == first.output[0].id
    assert found[4].id == "own"
    assert len({item.id for item in found}) == len(found)
    page = client.responses.input_items.list(name, limit=2)
    assert [item.id for item in page.data] == [item.id for item in found[:-3:-1]]
    assert page.has_more
    assert [item.id for item in client.responses.input_items.list(name, after=found[1].id)] == [found[0].id]
    with pytest.raises(openai.NotFoundError, match="no such item"):
        client.responses.input_items.list(name, after="x")
    with pytest.raises(openai.BadRequestError, match="limit is '0'"):
        client.responses.input_items.list(name, limit=0)
    with pytest.raises(openai.NotFoundError, match="is not stored here"):
        client.responses.input_items.list("resp_1")


def test_room_for_those_that_are_made() -> None:
    """They make room for nobody: who comes when there are only such is told to come again."""
    gate = Gate()
    settings = ServerSettings(max_responses=2, max_response_bytes=20_000, drain_seconds=1)
    with (
        live(FakeService(), settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.responses.create(model=NAME, input="a").id
        server.service.script = in_parts(gate)
        names = [create(client).id for _ in range(2)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole)
        with pytest.raises(openai.RateLimitError, match="leave no space for another"):
            create(client)
        server.service.script = speak
        passing = client.responses.create(model=NAME, input="a")  # which is answered, but not kept
        assert passing.output_text == "Hello, world"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(passing.id)
        gate.open()
        assert [ended(client, name).status for name in names] == ["completed"] * 2

        async def endless(request: Request) -> AsyncGenerator[Delta]:
            while True:
                yield TextDelta("thinker", "Hello", [1])

        server.service.script = endless
        events = list(create(client, stream=True))
        assert events[-1].type == "response.failed"
        assert "have grown to more than 20000 bytes" in events[-1].response.error.message
        assert server.service.cancelled.get(timeout=120)
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(model=NAME, input="a" * 20_000, background=True)
        assert caught.value.status_code == 413


@pytest.mark.parametrize(
    ("query", "field", "text"),
    [
        ("stream=perhaps", "stream", "it must be true or false"),
        ("stream=true&starting_after=-1", "starting_after", "sequence number"),
        ("stream=true&starting_after=" + "9" * 30, "starting_after", "sequence number"),
        ("starting_after=1", "starting_after", "stream is not true"),
    ],
)
def test_what_is_wrong_with_a_query_is_named(
    client: openai.OpenAI, server: Live, query: str, field: str, text: str
) -> None:
    name = create(client).id
    error = httpx.get(f"{server.url}/v1/responses/{name}?{query}", timeout=120).json()["error"]
    assert (error["param"], text in error["message"]) == (field, True), error


def test_what_is_not_kept_is_not_made_in_the_background(client: openai.OpenAI, server: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="background is True and store False") as caught:
        create(client, store=False)
    assert caught.value.param == "store"
