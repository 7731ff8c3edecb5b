"""POST /v1/messages, as clients of Anthropic's Messages API use it."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest
from calling_model import HERMES, THOUGHT_AND_CALLS
from fake_service import FakeService, Gate, Live, finished, live, sent, speak
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.media.encode import encode_image
from segue.messages.deltas import Choice, Delta, TextDelta
from segue.messages.errors import InvalidRequest, Overloaded, SegueError, StageFailed
from segue.messages.request import MediaPart, Request, TextPart
from segue.server.anthropic.request import MessagesBody, messages_request
from segue.server.anthropic.writer import MessageWriter
from segue.server.settings import ServerSettings

NAME = "fake-omni"
LOOK = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
WAIT = {"type": "custom", "name": "wait", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
PNG = base64.b64encode(encode_image(bytes(range(12)), 2, 2, "png")).decode()


def says(text: str, size: int = 3, reason: str = "stop", stopped_by: str | None = None) -> Any:
    """A script that says this in pieces of some letters."""

    async def script(request: Request) -> AsyncGenerator[Delta]:
        for start in range(0, len(text), size):
            ids = [1, 2, 3] if start == 0 and request.return_prompt_ids else []
            yield TextDelta("thinker", text[start : start + size], [start], prompt_token_ids=ids)
        yield msgspec.structs.replace(finished(reason), choices=[Choice(0, [1], reason, stop_reason=stopped_by)])

    return script


@pytest.fixture
def server(server: Live) -> Live:
    server.service.card.dialect = HERMES
    return server


def post(server: Live, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": NAME, "max_tokens": 99, "messages": [{"role": "user", "content": "Hello"}], **fields}
    if path != "/v1/messages":
        del body["max_tokens"]
    head = {"anthropic-version": "2023-06-01", "x-api-key": "none", "content-type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=json.dumps(body), headers=head, timeout=120)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Those of a stream; each is named by its type."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events."""
    assert found[0]["type"] == "message_start"
    message: dict[str, Any] = found[0]["message"]
    written = ""
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                written = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                grown = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
                if grown is None:
                    assert delta["type"] == "input_json_delta"
                    written += delta["partial_json"]
                else:
                    block[grown] += delta[grown]
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(written)
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    assert found[-1] == {"type": "message_stop"}
    return message


def test_a_message(server: Live) -> None:
    answer = post(
        server, system="Be brief.", temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END"], seed=7,
        metadata={"user_id": "u"},
    ).json()  # fmt: skip
    [request] = server.service.requests
    assert answer.pop("id") == request.request_id
    assert request.request_id.startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": NAME,
        "content": [{"type": "text", "text": "Hello, world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 5,
        },
    }  # fmt: skip
    assert [message.role for message in request.messages] == ["system", "user"]
    sampling = request.sampling["thinker"]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (99, 0.5, 0.9, 3)
    assert (sampling.stop, request.seed, request.tenant, request.modalities) == (["END"], 7, "u", ["text"])


def test_turns_and_blocks(server: Live) -> None:
    """Every kind of block; turns of one role in a row are one, results of tools are messages of their own."""
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    turns = [
        {"role": "user", "content": "What is"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": " this?", "cache_control": {"type": "ephemeral"}},
                {"type": "image", "source": source},
                {"type": "image", "source": {"type": "url", "url": f"data:image/png;base64,{PNG}"}},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A log."}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}},
                {"type": "tool_use", "id": "t2", "name": "wait", "input": {}, "toolset_name": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a ship"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}, {"type": "image", "source": source}],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Look "}, {"type": "text", "text": "well.", "cache_control": None}]
    assert post(server, messages=turns, system=system, tools=[LOOK, WAIT]).status_code == 200
    messages = server.service.requests[-1].messages
    texts = [
        (message.role, [part.text if isinstance(part, TextPart) else part.kind for part in message.content])
        for message in messages
    ]
    assert texts == [
        ("system", ["Look ", "well."]),
        ("user", ["What is", " this?", "image", "image", "A log."]),
        ("assistant", ["Let me see."]),
        ("tool", ["a ship"]),
        ("tool", ["no", "image"]),
        ("user", ["And now?"]),
    ]
    assert messages[2].extra["reasoning_content"] == "Hm."
    assert [(call["id"], call["function"]) for call in messages[2].extra["tool_calls"]] == [
        ("t1", {"name": "look", "arguments": {"at": "sea"}}), ("t2", {"name": "wait", "arguments": {}}),
    ]  # fmt: skip
    assert [message.extra.get("tool_call_id") for message in messages[3:5]] == ["t1", "t2"]
    shown = server.service.requests[-1].chat.tools
    assert shown[0]["function"] == {
        "name": "look", "description": "Look somewhere.", "parameters": LOOK["input_schema"],
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_and_tools(server: Live, size: int) -> None:
    """Whole and streamed are the same; thoughts are there for who asks for them."""
    server.service.script = says(THOUGHT_AND_CALLS, size)
    asked = {"tools": [LOOK, WAIT], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = post(server, **asked).json()
    [params] = server.service.requests[-1].sampling.values()
    assert (server.service.requests[-1].chat.template_kwargs, params.thinking_token_budget) == (
        {"enable_thinking": True}, 1024,
    )  # fmt: skip
    found = events(post(server, stream=True, **asked))
    streamed = put_together(found)
    for message in (whole, streamed):
        ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
        assert len(set(ids)) == 2
        assert message["content"] == [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "look", "input": {"at": "sea"}},
            {"type": "tool_use", "name": "wait", "input": {}},
        ]
        assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("tool_use", 5)
    for thinking in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        kinds = [block["type"] for block in post(server, **{**asked, "thinking": thinking}).json()["content"]]
        assert kinds == ["text", "tool_use", "tool_use"]
    post(server, thinking={"type": "disabled"})
    assert server.service.requests[-1].chat.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("held", "most"),
    [
        ({"tool_choice": {"type": "any"}}, 1024),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, 1024),
        ({"thinking": {"type": "adaptive"}}, None),
    ],
)
def test_how_much_is_thought_before_a_form(server: Live, held: dict[str, Any], most: int | None) -> None:
    server.service.script = says("{}")
    asked = {"tools": [LOOK], "thinking": {"type": "enabled", "budget_tokens": 1024}, **held}
    assert post(server, **asked).status_code == 200
    [params] = server.service.requests[-1].sampling.values()
    assert params.thinking_token_budget == most


def test_a_thought_before_a_call_that_must_come(server: Live) -> None:
    server.service.script = says('<think>Hm.</think>{"at": "sea"}')
    forced = {"tool_choice": {"type": "tool", "name": "look"}, "tools": [LOOK]}
    asked = {**forced, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for message in (post(server, **asked).json(), put_together(events(post(server, stream=True, **asked)))):
        thought, call = message["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "sea"})


def test_the_prompt_is_counted_at_the_start(server: Live) -> None:
    server.service.script = says("Hello")
    first, *_ = events(post(server, stream=True))
    assert first["message"]["usage"] == {"input_tokens": 3, "output_tokens": 0}
    assert (first["message"]["content"], first["message"]["stop_reason"]) == ([], None)


@pytest.mark.parametrize(
    ("script", "reason", "sequence"),
    [
        (says("A ship."), "end_turn", None),
        (says("A shi", reason="length"), "max_tokens", None),
        (says("A ", stopped_by="ship"), "stop_sequence", "ship"),
        (says(""), "end_turn", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stopped(server: Live, script: Any, reason: str, sequence: str | None, stream: bool) -> None:
    server.service.script = script
    answer = post(server, stream=stream)
    message = put_together(events(answer)) if stream else answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_call_that_is_cut_off(server: Live) -> None:
    server.service.script = says('{"at": "s', reason="length")
    message = post(server, tools=[LOOK], tool_choice={"type": "tool", "name": "look"}).json()
    assert [(block["name"], block["input"]) for block in message["content"]] == [("look", {})]
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "held"),
    [
        ({"type": "auto"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "look"}, True),
        ({"type": "none"}, False),
    ],
)
def test_which_tools(server: Live, choice: dict[str, Any], held: bool) -> None:
    server.service.script = says('[{"name": "look", "parameters": {"at": "sea"}}]' if choice["type"] == "any" else "{}")
    assert post(server, tools=[LOOK], tool_choice=choice).status_code == 200
    request = server.service.requests[-1]
    form = request.sampling["thinker"].structured_outputs
    assert (form is not None) == held
    assert bool(request.chat.tools) == (choice["type"] != "none")
    if choice["type"] == "any":
        assert form is not None
        assert form.json["maxItems"] == 1  # type: ignore[index]


def test_a_reply_that_the_client_has_begun(server: Live) -> None:
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "At "}]
    assert post(server, messages=turns).status_code == 200
    chat = server.service.requests[-1].chat
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)


def test_a_form_for_the_text(server: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    assert post(server, output_config=config).status_code == 200
    held = server.service.requests[-1].sampling["thinker"].structured_outputs
    assert held is not None
    assert held.json == schema


def test_tokens_are_counted(server: Live) -> None:
    async def counted(request: Request) -> AsyncGenerator[Delta]:
        async for delta in speak(msgspec.structs.replace(request, prompt="abcde")):
            yield delta

    server.service.script = counted
    answer = post(server, "/v1/messages/count_tokens", system="Be brief.", tools=[LOOK])
    assert answer.json() == {"input_tokens": 5}
    [request] = server.service.requests
    assert request.modalities == ["tokens"]
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.chat.tools


def test_what_goes_wrong_on_the_way(server: Live) -> None:
    async def breaks(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "Hel", [1])
        raise StageFailed("the card is on fire")

    async def full(request: Request) -> AsyncGenerator[Delta]:
        raise Overloaded("come again")
        yield finished()

    server.service.script = breaks
    error = {"type": "error", "error": {"type": "api_error", "message": "the card is on fire"}}
    assert events(post(server, stream=True))[-1] == error
    answer = post(server)
    assert (answer.status_code, answer.json()) == (500, error)
    server.service.script = full
    for stream in (False, True):
        answer = post(server, stream=stream)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")


def test_what_the_stages_refuse_is_named_as_the_client_wrote_it(server: Live) -> None:
    async def refuses(request: Request) -> AsyncGenerator[Delta]:
        media = next(part for message in request.messages for part in message.content if isinstance(part, MediaPart))
        raise InvalidRequest(f"{media.field} is no image", field=media.field)
        yield finished()

    server.service.script = refuses
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}, image]}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = post(server, path, messages=turns, system="c")
        assert "messages[1].content[1]" in answer.json()["error"]["message"]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["a"]}, "messages[0] is 'a'"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "video"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is None"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "this server does not accept there"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "no files"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "ftp:x"}}]}]},
            "messages[0].content[0].source",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id is None"),
        ({"system": 3}, "system is 3"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools of its own"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'"),
        ({"tools": [{"name": "a", "schema": {}}]}, "tools[0].schema"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "lock"}}, "tool_choice.name is 'lock'"),
        ({"tools": [LOOK], "tool_choice": {"type": "sometimes"}}, "tool_choice.type is 'sometimes'"),
        ({"tools": [LOOK], "tool_choice": {"type": []}}, "tool_choice.type is []"),
        ({"thinking": {"type": "much"}}, "thinking.type is 'much'"),
        ({"thinking": {"type": "enabled", "budget_tokens": "1k"}}, "thinking.budget_tokens is '1k'"),
        ({"output_config": {"effort": "enormous"}}, "output_config.effort is 'enormous'"),
        ({"output_config": {"effort": {}}}, "output_config.effort is {}"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"metadata": {"user_id": "u" * 300}}, "metadata.user_id has 300 characters"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperatur": 1}, "did you mean 'temperature'"),
    ],
)
def test_what_is_wrong_is_named(server: Live, fields: dict[str, Any], text: str) -> None:
    answer = post(server, **fields)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert text in body["error"]["message"], body


def test_what_clients_send_besides(server: Live) -> None:
    answer = post(server, cache_control={"type": "ephemeral"}, context_management={"edits": []}, service_tier="auto")
    assert answer.status_code == 200


def test_errors_have_their_own_shape_everywhere() -> None:
    with live(FakeService(), ServerSettings(api_key="secret", drain_seconds=1)) as server:
        answer = post(server)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        for head in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            body = {"model": NAME, "max_tokens": 9, "messages": [USER]}
            assert httpx.post(f"{server.url}/v1/messages", json=body, headers=head, timeout=120).status_code == 200
            wrong = httpx.get(f"{server.url}/v1/messages", headers=head, timeout=120)
            assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
            lost = httpx.post(f"{server.url}/v1/messages", json={**body, "model": "other"}, headers=head, timeout=120)
            assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
        other = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "secret"}, timeout=120)
        assert other.status_code == 401


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**30) | st.floats(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)
_NAMES = (
    "type", "text", "source", "data", "media_type", "url", "tool_use_id", "content", "id", "name", "input", "thinking",
    "input_schema", "effort", "format", "schema", "user_id",
)  # fmt: skip
_WORDS = (
    "text", "image", "document", "tool_result", "tool_use", "thinking", "base64", "url", "auto", "any", "tool",
    "enabled", "json_schema", "look",
)  # fmt: skip
_BLOCK = st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_WORDS) | _JSON, max_size=5)
_TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "system"))},
    optional={"content": st.text(max_size=6) | st.lists(_BLOCK | _JSON, max_size=3) | _JSON},
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(MessagesBody.__struct_fields__), _JSON | _BLOCK | st.lists(_BLOCK, max_size=2), max_size=3
    ),
    st.lists(_TURN, min_size=1, max_size=3),
)
def test_no_body_makes_a_500(body: dict[str, Any], turns: list[dict[str, Any]]) -> None:
    """What is taken can be answered; all else is refused with a reason."""
    card = msgspec.structs.replace(FakeService().card, dialect=HERMES)
    refusal: SegueError | None = None
    try:
        values = {"model": NAME, "max_tokens": 9, "messages": turns, **body}
        asked = messages_request(values, card, ServerSettings())
    except SegueError as error:
        refusal = error
    if refusal is not None:
        assert refusal.message
        assert 400 <= refusal.status < 500
        return
    writer = MessageWriter(asked)
    writer.take(TextDelta("thinker", "A ship.", [1]))
    writer.take(finished())
    assert msgspec.json.decode(msgspec.json.encode(writer.message))["stop_reason"] == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(stream: bool) -> None:
    gate = Gate()

    async def script(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "A", [1])
        await gate.wait()
        yield finished()

    body: dict[str, object] = {"model": NAME, "max_tokens": 9, "messages": [USER], "stream": stream}
    with live(FakeService(script)) as server:
        with sent(server.port, "/v1/messages", body):
            assert gate.reached.wait(120)
        assert server.service.cancelled.get(timeout=120) == server.service.requests[-1].request_id


def test_thoughts_of_one_reply_are_one(server: Live) -> None:
    def thinking(*texts: str) -> dict[str, Any]:
        blocks = [{"type": "thinking", "thinking": text, "signature": ""} for text in texts]
        return {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Yes."}]}

    asked = {"role": "user", "content": "Well?"}
    turns = [asked, thinking("a", "b"), thinking("c"), asked, thinking("d"), asked]
    assert post(server, messages=turns).status_code == 200
    messages = server.service.requests[-1].messages
    assert [message.extra.get("reasoning_content") for message in messages] == [None, "abc", None, "d", None]
