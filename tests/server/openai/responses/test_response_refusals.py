"""What `/v1/responses` refuses: by the name that the client wrote, and never as a failure of the server."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from calling_model import HERMES, WAIT
from fake_service import FakeService, Live, finished, live
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.media.encode import encode_image
from segue.messages.deltas import Delta, TextDelta
from segue.messages.errors import InvalidRequest, SegueError
from segue.messages.request import MediaPart, Request
from segue.server.openai.responses.request import ResponsesBody, responses_request
from segue.server.openai.responses.writer import ResponseWriter
from segue.server.settings import ServerSettings

NAME = "fake-omni"
PNG = "data:image/png;base64," + base64.b64encode(encode_image(bytes(range(12)), 2, 2, "png")).decode()


@pytest.mark.usefixtures("calling")
@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"input": None}, "input", "got null"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [3]}, "input[0]", "it must be an item"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "not an item that this server accepts"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input[0].type",
            "not an item that this server accepts",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "no known role"),
        ({"input": [{"role": "user", "content": "a", "tone": 1}]}, "input[0].tone", "unknown parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "it must be a string or a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "not a part"),
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
            {"instructions": "b", "input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": 5}]},
            "input[0].arguments",
            "JSON of an object",
        ),
        ({"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0].content[0]", "reasoning_text"),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": []}]}]},
            "input[0].content[0].type",
            "not a part that this server accepts",
        ),
        ({"conversation": "conv_1"}, "conversation", "leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "leave it out"),
        ({"truncation": "auto"}, "truncation", "use 'disabled'"),
        ({"include": ["file_search_call.results"]}, "include[0]", "does not support that"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type is 'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "must be an object"),
        ({"text": {"form": {}}}, "text.form", "did you mean"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not summarised"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort is 'much'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools of its own"),
        ({"tools": [WAIT, {"type": "function", "name": "a b"}]}, "tools[1].name", "tools[1].name is 'a b'"),
        (
            {"tools": [WAIT], "tool_choice": {"type": "function", "name": "lock"}},
            "tool_choice.name",
            "is not one of tools",
        ),
        ({"tools": [WAIT], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "function and allowed_tools"),
        (
            {"tools": [WAIT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice.tools[0]",
            "is not one of tools",
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
        ({"previous_response_id": "resp_1"}, "previous_response_id", "which is not stored here"),
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


def test_what_the_stages_refuse_is_named_as_the_client_wrote_it(client: openai.OpenAI, server: Live) -> None:
    async def refuses(request: Request) -> AsyncGenerator[Delta]:
        media = next(part for message in request.messages for part in message.content if isinstance(part, MediaPart))
        raise InvalidRequest(f"{media.field} is no image", field=media.field)
        yield finished()

    server.service.script = refuses
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": PNG, "detail": "auto"}]}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]\.content\[0\] is no image") as caught:
            client.responses.create(
                model=NAME, input=[{"role": "user", "content": "a"}, item], instructions="b", stream=stream
            )
        assert caught.value.param == "input[1].content[0]"


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
    card = msgspec.structs.replace(FakeService().card, dialect=HERMES)
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
