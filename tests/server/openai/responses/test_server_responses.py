"""POST /v1/responses, driven by the official client."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from calling_model import LOOK, THOUGHT_AND_CALLS, WAIT, says, told
from fake_service import FakeService, Gate, Live, finished, live, sent

from segue.media.encode import encode_image
from segue.messages.deltas import Delta, TextDelta, TokenLogprobs, TopToken
from segue.messages.errors import StageFailed
from segue.messages.request import MediaPart, Request

pytestmark = pytest.mark.usefixtures("calling")
NAME = "fake-omni"
PNG = "data:image/png;base64," + base64.b64encode(encode_image(bytes(range(12)), 2, 2, "png")).decode()


def test_a_text(client: openai.OpenAI, server: Live) -> None:
    reply = client.responses.create(
        model=NAME, input="Hello", instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9,
        metadata={"a": "b"}, user="u", extra_body={"seed": 7, "top_k": 3},
    )  # fmt: skip
    assert reply.output_text == "Hello, world"
    [message] = reply.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    assert (reply.status, reply.object, reply.model, reply.error, reply.incomplete_details) == (
        "completed", "response", NAME, None, None,
    )  # fmt: skip
    assert (reply.instructions, reply.max_output_tokens, reply.temperature, reply.top_p) == ("Be brief.", 9, 0.5, 0.9)
    assert (reply.metadata, reply.user, reply.store, reply.previous_response_id) == ({"a": "b"}, "u", True, None)
    usage = reply.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (10, 4)
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens, usage.total_tokens) == (5, 0, 15)
    [request] = server.service.requests
    assert request.request_id == reply.id
    assert reply.id.startswith("resp_")
    assert told(server) == [("system", "Be brief."), ("user", "Hello")]
    sampling = request.sampling["thinker"]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 3)
    assert (request.modalities, request.seed, request.tenant) == (["text"], 7, "u")


def test_items(client: openai.OpenAI, server: Live) -> None:
    """Every kind, and a reply in several items is one message."""
    items: Any = [
        {"role": "developer", "content": "Look well."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is this?"},
                {"type": "input_image", "image_url": PNG, "detail": "auto"},
                {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"at": "sea"}'},
        {"type": "function_call", "call_id": "call_2", "name": "wait", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a ship"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "xyz"},
        {"role": "assistant", "content": "A ship."},
        {"role": "assistant", "content": "It sails."},
        {"role": "user", "content": "Where to?"},
    ]
    client.responses.create(model=NAME, input=items)
    assert told(server) == [
        ("system", "Look well."),
        ("user", "What is this?"),
        ("assistant", "Let me see."),
        ("tool", "a ship"),
        ("tool", "done"),
        ("assistant", "A ship."),
        ("assistant", "It sails."),
        ("user", "Where to?"),
    ]
    messages = server.service.requests[-1].messages
    media = [part for part in messages[1].content if isinstance(part, MediaPart)]
    assert [part.kind for part in media] == ["image", "audio"]
    assert messages[2].extra["reasoning_content"] == "Hm."
    assert [(call["id"], call["function"]) for call in messages[2].extra["tool_calls"]] == [
        ("call_1", {"name": "look", "arguments": {"at": "sea"}}), ("call_2", {"name": "wait", "arguments": {}}),
    ]  # fmt: skip
    assert [message.extra.get("tool_call_id") for message in messages[3:5]] == ["call_1", "call_2"]


def test_a_thought_that_nothing_follows(client: openai.OpenAI, server: Live) -> None:
    """Of a reply that was cut off while it was thought about."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items: Any = [{"role": "user", "content": "Hello"}, thought]
    for more in ([], [{"role": "user", "content": "Well?"}]):
        client.responses.create(model=NAME, input=items + more)
        assert told(server)[:2] == [("user", "Hello"), ("assistant", "")]
        assert server.service.requests[-1].messages[1].extra["reasoning_content"] == "Hm."


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_and_calls(client: openai.OpenAI, server: Live, size: int) -> None:
    """Whole and streamed are the same, and every event fits those before it."""
    server.service.script = says(THOUGHT_AND_CALLS, size)
    whole = client.responses.create(model=NAME, input="What is at sea?", tools=[LOOK, WAIT])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, look, wait = whole.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Hm."]
    assert message.type == "message"
    assert whole.output_text == "Let me see."
    assert look.type == wait.type == "function_call"
    assert (look.name, look.arguments, wait.name, wait.arguments) == ("look", '{"at": "sea"}', "wait", "{}")
    assert look.call_id != wait.call_id
    assert whole.status == "completed"
    [shown, _] = server.service.requests[-1].chat.tools
    assert shown["function"] == {name: LOOK[name] for name in ("name", "parameters", "strict")}
    usage = whole.usage
    assert usage is not None
    if size == 1:  # a token per letter: the thought's, its marks among them
        assert 3 <= usage.output_tokens_details.reasoning_tokens < THOUGHT_AND_CALLS.index("Let")

    with client.responses.stream(model=NAME, input="What is at sea?", tools=[LOOK, WAIT]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"

    def bare(item: Any) -> Any:
        kept = item.to_dict()
        return {name: kept[name] for name in kept if name not in ("id", "call_id", "parsed_arguments")}

    assert [bare(item) for item in final.output][2:] == [bare(item) for item in whole.output][2:]
    assert final.output_text == whole.output_text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    for index, kind in enumerate(
        ("reasoning_text", "output_text", "function_call_arguments", "function_call_arguments")
    ):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        names = [event.type.removeprefix("response.") for event in own]
        parts = kind != "function_call_arguments"
        assert names[: 1 + parts] == ["output_item.added", *(["content_part.added"] if parts else [])]
        deltas = [event.delta for event in own if event.type == f"response.{kind}.delta"]
        end: Any = next(event for event in own if event.type == f"response.{kind}.done")
        assert "".join(deltas) == (end.text if parts else end.arguments) != ""
        assert names[-1] == "output_item.done"


def test_the_stream_on_the_wire(server: Live) -> None:
    """Each event is named by its type; nothing follows the last one."""
    body = {"model": NAME, "input": "Hello", "stream": True}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=120)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-1][0] == "event: response.completed"


def test_what_is_cut_off_is_incomplete(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says("A shi", reason="length")
    reply = client.responses.create(model=NAME, input="Hello", max_output_tokens=3)
    assert (reply.status, reply.output_text) == ("incomplete", "A shi")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[-1].status == "incomplete"  # type: ignore[union-attr]
    events = list(client.responses.create(model=NAME, input="Hello", stream=True))
    assert events[-1].type == "response.incomplete"


def test_a_reply_of_nothing_is_an_empty_message(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says("")
    reply = client.responses.create(model=NAME, input="Hello")
    assert (reply.output_text, [item.type for item in reply.output]) == ("", ["message"])


def test_what_goes_wrong_on_the_way(client: openai.OpenAI, server: Live) -> None:
    async def breaks(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "Hel", [1])
        raise StageFailed("the card is on fire")

    server.service.script = breaks
    events = list(client.responses.create(model=NAME, input="Hello", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the card is on fire")
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]
    with pytest.raises(openai.InternalServerError, match="on fire"):
        client.responses.create(model=NAME, input="Hello")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_a_form_for_the_text(client: openai.OpenAI, server: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form: Any = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    reply = client.responses.create(model=NAME, input="a", text={"format": form})
    held = server.service.requests[-1].sampling["thinker"].structured_outputs
    assert held is not None
    assert held.json == schema
    assert reply.text is not None
    assert reply.text.format is not None
    assert reply.text.format.type == "json_schema"
    client.responses.create(model=NAME, input="a", text={"format": {"type": "json_object"}})
    held = server.service.requests[-1].sampling["thinker"].structured_outputs
    assert held is not None
    assert held.json_object
    client.responses.create(model=NAME, input="a", text={"format": {"type": "text"}})
    assert server.service.requests[-1].sampling == {}


def test_tools_that_must_be_called(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says('{"at": "sea"}')
    reply = client.responses.create(
        model=NAME, input="a", tools=[WAIT, LOOK], tool_choice={"type": "function", "name": "look"}
    )
    [call] = reply.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("look", '{"at": "sea"}')
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    server.service.script = says('[{"name": "look", "parameters": {"at": "sea"}}]')
    reply = client.responses.create(model=NAME, input="a", tools=[WAIT, LOOK], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in server.service.requests[-1].chat.tools] == ["look"]
    assert [item.type for item in reply.output] == ["function_call"]


def test_reasoning_effort(client: openai.OpenAI, server: Live) -> None:
    client.responses.create(model=NAME, input="a", reasoning={"effort": "none", "summary": "auto"})
    assert server.service.requests[-1].chat.template_kwargs == {"enable_thinking": False}


def test_log_probabilities(client: openai.OpenAI, server: Live) -> None:
    async def script(request: Request) -> AsyncGenerator[Delta]:
        for index, word in enumerate(("A", " ship")):
            token = TopToken(index, -0.5 - index, 1, word, word.encode())
            yield TextDelta("thinker", word, [index], logprobs=[TokenLogprobs(token, [token])])
        yield finished()

    server.service.script = script
    reply = client.responses.create(model=NAME, input="a", include=["message.output_text.logprobs"], top_logprobs=1)
    [message] = reply.output
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in part.logprobs] == [
        ("A", -0.5, 1), (" ship", -1.5, 1),
    ]  # fmt: skip
    assert server.service.requests[-1].sampling["thinker"].logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(stream: bool) -> None:
    gate = Gate()

    async def script(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "A", [1])
        await gate.wait()
        yield finished()

    with live(FakeService(script)) as server:
        with sent(server.port, "/v1/responses", {"model": NAME, "input": "a", "stream": stream}):
            assert gate.reached.wait(120)
        assert server.service.cancelled.get(timeout=120) == server.service.requests[-1].request_id
