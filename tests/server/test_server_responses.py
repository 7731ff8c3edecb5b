"""POST /v1/responses, driven by the official client."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fake_service import FakeService, Gate, Live, finished, live, sent, speak
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.media.encode import encode_png
from segue.messages.deltas import Delta, TextDelta, TokenLogprobs, TopToken
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.messages.request import MediaPart, Request, TextPart
from segue.models.chat_template import ChatTemplate
from segue.models.dialects.dialect import CALL_FORMATS, Dialect
from segue.models.dialects.reasoning import THINK
from segue.server.response_request import ResponsesBody, responses_request
from segue.server.response_writer import ResponseWriter
from segue.server.settings import ServerSettings

NAME = "fake-omni"
TEMPLATE = ChatTemplate("{{ tools }}{{ enable_thinking }}{% if add_generation_prompt %}<|assistant|>{% endif %}")
QWEN = Dialect(TEMPLATE, CALL_FORMATS["hermes"], THINK)
LOOK: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "strict": False,
}
WAIT: Any = {"type": "function", "name": "wait", "parameters": {"type": "object"}, "strict": False}
REPLY = (
    "<think>\nHm.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)
PNG = "data:image/png;base64," + base64.b64encode(encode_png(bytes(range(12)), 2, 2)).decode()


def says(text: str, size: int = 3, reason: str = "stop") -> Any:
    """A script that says this in pieces of some letters."""

    async def script(request: Request) -> AsyncGenerator[Delta]:
        for start in range(0, len(text), size):
            yield TextDelta("thinker", text[start : start + size], [start])
        yield finished(reason)

    return script


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    with live(FakeService()) as server:
        yield server


@pytest.fixture
def server(running: Live) -> Live:
    running.service.script = speak
    running.service.card.dialect = QWEN
    running.service.requests.clear()
    return running


def said(server: Live) -> list[tuple[str, str]]:
    """(role, text) of the last request's messages."""
    return [
        (message.role, "".join(part.text for part in message.content if isinstance(part, TextPart)))
        for message in server.service.requests[-1].messages
    ]


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
    assert said(server) == [("system", "Be brief."), ("user", "Hello")]
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
    assert said(server) == [
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


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_and_calls(client: openai.OpenAI, server: Live, size: int) -> None:
    """Whole and streamed are the same, and every event fits those before it."""
    server.service.script = says(REPLY, size)
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
        assert 3 <= usage.output_tokens_details.reasoning_tokens < REPLY.index("Let")

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


def test_what_the_stages_refuse_is_named_as_the_client_wrote_it(client: openai.OpenAI, server: Live) -> None:
    async def refuses(request: Request) -> AsyncGenerator[Delta]:
        media = next(part for message in request.messages for part in message.content if isinstance(part, MediaPart))
        raise InvalidRequest(f"{media.field} is no picture", field=media.field)
        yield finished()

    server.service.script = refuses
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": PNG, "detail": "auto"}]}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]\.content\[0\] is no picture") as caught:
            client.responses.create(
                model=NAME, input=[{"role": "user", "content": "a"}, item], instructions="b", stream=stream
            )
        assert caught.value.param == "input[1].content[0]"


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


# ── what is kept ───────────────────────────────────────────────────────────────────────────────────────────────────


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
    assert said(server) == [("user", "One"), ("assistant", "Hello, world"), ("user", "Two")]
    client.responses.delete(first.id)
    ask("Three", previous_response_id=second.id)
    assert said(server) == [
        ("user", "One"), ("assistant", "Hello, world"), ("user", "Two"), ("assistant", "Hello, world"),
        ("user", "Three"),
    ]  # fmt: skip
    assert client.responses.retrieve(second.id).output_text == "Hello, world"
    with pytest.raises(openai.NotFoundError, match="no such response is kept"):
        ask("Four", previous_response_id=first.id)


def test_a_call_is_answered_from_what_is_kept(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says(REPLY)
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
        with pytest.raises(openai.NotFoundError, match="no such response is kept here"):
            call(reply.id)


def test_a_response_that_has_ended_cannot_be_cancelled(client: openai.OpenAI, server: Live) -> None:
    reply = client.responses.create(model=NAME, input="a")
    with pytest.raises(openai.BadRequestError, match="was not made in the background"):
        client.responses.cancel(reply.id)
    with pytest.raises(openai.BadRequestError, match="events are kept of responses that are made in the background"):
        client.responses.retrieve(reply.id, stream=True)


def test_the_oldest_make_room() -> None:
    settings = ServerSettings(max_responses=2, drain_seconds=1)
    with (
        live(FakeService(), settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        ids = [client.responses.create(model=NAME, input="a").id for _ in range(3)]
        assert [client.responses.retrieve(name).id for name in ids[1:]] == ids[1:]
        with pytest.raises(openai.NotFoundError, match="this server keeps 2"):
            client.responses.retrieve(ids[0])


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"input": None}, "input", "got null"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [3]}, "input[0]", "it must be an item"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "no item this server takes"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "no item this server takes"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "no known role"),
        ({"input": [{"role": "user", "content": "a", "tone": 1}]}, "input[0].tone", "unknown parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "it must be a string or a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "no part"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
            "this server keeps no files",
        ),
        (
            {"input": [{"role": "user", "content": ["a", {"type": "input_image", "image_url": "data:x"}]}]},
            "input[0].content[1].image_url.url",
            "input[0].content[1]",
        ),
        (
            {"instructions": "b", "input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{"}]},
            "input[0].arguments",
            "not JSON",
        ),
        ({"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0].content[0]", "reasoning_text"),
        ({"conversation": "conv_1"}, "conversation", "leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "leave it out"),
        ({"truncation": "auto"}, "truncation", "use 'disabled'"),
        ({"include": ["file_search_call.results"]}, "include[0]", "no such thing"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type is 'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "must be an object"),
        ({"text": {"form": {}}}, "text.form", "did you mean"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not summarised"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort is 'much'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools of its own"),
        ({"tools": [WAIT, {"type": "function", "name": "a b"}]}, "tools[1].name", "tools[1].name is 'a b'"),
        ({"tools": [WAIT], "tool_choice": {"type": "function", "name": "lock"}}, "tool_choice.name", "has not"),
        ({"tools": [WAIT], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "function and allowed_tools"),
        (
            {"tools": [WAIT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice.tools[0]",
            "has not",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot'"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"input": [{"role": "user", "content": "a", "id": 10**30}]}, "input", "a number that is too large"),
        ({"tools": [{**WAIT, "parameters": {"maximum": 10**30}}]}, "tools", "a number that is too large"),
        ({"messages": []}, "messages", "unknown parameter"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream is not true"),
        ({"model": "other"}, "model", "is not served here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no such response is kept here"),
    ],
)
def test_what_is_wrong_is_named(server: Live, fields: dict[str, Any], field: str, text: str) -> None:
    body = json.dumps({"model": NAME, "input": "a", **fields})
    head = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/responses", content=body, headers=head, timeout=120)
    assert answer.status_code == (404 if field in ("model", "previous_response_id") else 400), answer.text
    error = answer.json()["error"]
    assert (error["param"], text in error["message"]) == (field, True), error


def test_a_model_without_text() -> None:
    service = FakeService()
    service.card = msgspec.structs.replace(service.card, gives=frozenset({"image"}))
    with live(service) as server:
        answer = httpx.post(f"{server.url}/v1/responses", json={"model": NAME, "input": "a"}, timeout=120)
        assert "gives no text (it gives image)" in answer.json()["error"]["message"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**30) | st.floats(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)
_NAMES = (
    "type", "role", "content", "text", "name", "arguments", "call_id", "output", "summary", "image_url", "file_id",
    "input_audio", "detail", "format", "mode", "tools", "schema", "effort", "parameters",
)  # fmt: skip
_WORDS = (
    "message", "user", "assistant", "reasoning", "function_call", "function_call_output", "input_text", "input_image",
    "input_audio", "refusal", "function", "allowed_tools", "json_schema", "auto", "look",
)  # fmt: skip
_VALUE = st.sampled_from(_WORDS) | _JSON
_OBJECT = st.dictionaries(
    st.sampled_from(_NAMES),
    _VALUE | st.lists(st.dictionaries(st.sampled_from(_NAMES), _VALUE, max_size=3), max_size=2),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(ResponsesBody.__struct_fields__),
        _JSON | _OBJECT | st.lists(_OBJECT | _JSON, max_size=3) | st.sampled_from(_WORDS),
        max_size=3,
    ),
    st.lists(_OBJECT, max_size=4),
)
def test_no_body_makes_a_500(body: dict[str, Any], items: list[dict[str, Any]]) -> None:
    """What is taken can be answered; all else is refused with a reason."""
    card = msgspec.structs.replace(FakeService().card, dialect=QWEN)
    refusal: SegueError | None = None
    try:
        asked = responses_request({"model": NAME, "input": items, **body}, [], card, ServerSettings())
    except SegueError as error:
        refusal = error
    if refusal is not None:
        assert refusal.message
        assert 400 <= refusal.status < 500
        return
    writer = ResponseWriter(asked)
    writer.take(TextDelta("thinker", "A ship.", [1]))
    writer.take(finished())
    assert msgspec.json.decode(msgspec.json.encode(writer.response))["status"] == "completed"


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
