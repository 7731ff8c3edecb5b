"""What a stage refuses is named as the client wrote it, whichever endpoint and whichever of two spellings it used."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fake_service import Live, finished

from segue.messages.deltas import Delta
from segue.messages.errors import InvalidRequest, TooLong
from segue.messages.request import Request

NAME = "fake-omni"
HELLO = [{"role": "user", "content": "Hello"}]


def refuse(server: Live, error: InvalidRequest, path: str, **fields: Any) -> dict[str, Any]:
    """The answer where the stages refuse the request with `error`."""

    async def script(request: Request) -> AsyncGenerator[Delta]:
        if request.prompt == "fine":
            yield finished()
            return
        raise error

    server.service.script = script
    answer = httpx.post(f"{server.url}{path}", json={"model": NAME, **fields}, timeout=120)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["Hello", HELLO])
def test_a_conversation_that_is_too_long_is_the_input_of_a_response(server: Live, given: object, stream: bool) -> None:
    error = TooLong("messages are 2000 tokens; the context is 1000 tokens", field="messages", stage="input")
    told = refuse(server, error, "/v1/responses", input=given, stream=stream)
    assert (told["param"], told["code"]) == ("input", "context_length_exceeded")
    assert told["message"] == "input are 2000 tokens; the context is 1000 tokens"


def test_a_part_of_it_keeps_its_own_place(server: Live) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *HELLO]
    error = InvalidRequest("messages[2].content is odd", field="messages[2].content")
    assert refuse(server, error, "/v1/responses", input=items)["param"].startswith("input[2]")


def test_the_messages_of_a_chat_are_called_so(server: Live) -> None:
    error = TooLong("too long", field="messages")
    assert refuse(server, error, "/v1/chat/completions", messages=HELLO)["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"prompt_token_ids": [1, 2]}, "prompt_token_ids"),
        ("/v1/completions", {"prompt": "a"}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/v1/completions", {"prompt": ["fine", "b"]}, "prompt[1]"),
    ],
)
def test_what_was_sent_in_place_of_messages_is_named(
    server: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    error = TooLong("the prompt has 9 tokens", field="messages", stage="thinker")
    assert refuse(server, error, path, **fields)["param"] == param


FORM = "sampling.thinker.structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"guided_grammar": "x", "response_format": {"type": "text"}}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "x"}, "response_format": {"type": "text"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_response_format_that_asks_for_nothing_is_not_what_is_wrong(
    server: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    asked: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
    told = refuse(server, InvalidRequest(f"{FORM} cannot be compiled", field=FORM), path, **asked, **fields)
    assert (told["param"], told["message"]) == (param, f"{param} cannot be compiled")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"messages": HELLO, "max_completion_tokens": 1 << 40}, "max_completion_tokens"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 1 << 40}, "max_tokens"),
        ("responses", {"input": "Hello", "max_output_tokens": 1 << 40}, "max_output_tokens"),
        ("messages", {"messages": HELLO, "max_tokens": 1 << 40}, "max_tokens"),
        ("chat/completions", {"messages": HELLO, "use_beam_search": True, "n": 40}, "use_beam_search"),
        ("completions", {"prompt": "a", "logprobs": -7}, "logprobs"),
    ],
)
def test_what_is_out_of_range_is_named_as_it_was_sent(
    server: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": NAME, **fields}, timeout=120)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(f"{param} is ")
    assert error.get("param", param) == param  # Anthropic's errors have none


BAD = InvalidRequest(f"{FORM}.json cannot be compiled: at properties.a: no", field=f"{FORM}.json")
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/responses",
            {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
            "text.format.schema",
        ),
        ("/v1/completions", {"prompt": "a", "guided_json": {}}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {}}}, "structured_outputs.json"),
    ],
)
def test_the_part_of_the_request_that_has_the_schema_is_named(
    server: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    told = refuse(server, BAD, path, **fields)
    assert told["param"] == param
    assert told["message"] == f"{param} cannot be compiled: at properties.a: no"


@pytest.mark.usefixtures("calling")
def test_the_schema_of_a_tool_is_named(server: Live) -> None:
    of_chat = {"messages": HELLO, "tools": [{"type": "function", "function": TOOL}]}
    chosen = {"type": "function", "function": {"name": "look"}}
    told = refuse(server, BAD, "/v1/chat/completions", **of_chat, tool_choice=chosen)
    assert told["param"] == "tools[0].function.parameters"
    told = refuse(server, BAD, "/v1/chat/completions", **of_chat, tool_choice="required")
    assert told["param"] == "tools"
    flat = {"tools": [{"type": "function", **TOOL}], "tool_choice": {"type": "function", "name": "look"}}
    assert refuse(server, BAD, "/v1/responses", input="Hello", **flat)["param"] == "tools[0].parameters"
