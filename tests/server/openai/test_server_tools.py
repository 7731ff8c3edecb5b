"""Tools and reasoning in `/v1/chat/completions`, driven by the official client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from calling_model import CALLS, HERMES, TEMPLATE, says
from fake_service import FakeService, Live, live

from segue.models.shared.dialects.dialect import CALL_FORMATS, Dialect
from segue.models.shared.dialects.reasoning import THINK
from segue.models.shared.text.chat_template import ChatTemplate
from segue.server.settings import ServerSettings

HELLO: list[Any] = [{"role": "user", "content": "What is at sea?"}]
pytestmark = pytest.mark.usefixtures("calling")


def tool(name: str, **parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


LOOK, WAIT = tool("look", properties={"at": {"type": "string"}}, required=["at"]), tool("wait")


def test_the_model_calls_tools(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says(CALLS)
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO, tools=[LOOK, WAIT])
    [choice] = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "look", '{"at": "sea"}'), ("function", "wait", "{}"),
    ]  # fmt: skip
    assert len({call.id for call in calls}) == 2
    [request] = server.service.requests
    assert request.chat.tools == [LOOK, WAIT]
    assert request.sampling == {}, "nothing holds the reply"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_stream(client: openai.OpenAI, server: Live, size: int) -> None:
    server.service.script = says(CALLS, size)
    said, calls, reasons = "", {}, []
    for chunk in client.chat.completions.create(model="fake-omni", messages=HELLO, tools=[LOOK, WAIT], stream=True):
        [choice] = chunk.choices
        said += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id is not None:
                assert call.index == len(calls)
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    assert said == "Let me see."
    assert calls == {0: ["look", '{"at": "sea"}'], 1: ["wait", "{}"]}
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_one_call_at_a_time(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says(CALLS)
    reply = client.chat.completions.create(
        model="fake-omni", messages=HELLO, tools=[LOOK, WAIT], parallel_tool_calls=False
    )
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["look"]


def test_without_tools_nothing_is_looked_for(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says(CALLS)
    for tools in ({}, {"tools": [LOOK], "tool_choice": "none"}):
        reply = client.chat.completions.create(model="fake-omni", messages=HELLO, **tools)  # type: ignore[call-overload]
        assert reply.choices[0].message.content == CALLS
        assert (reply.choices[0].message.tool_calls, reply.choices[0].finish_reason) == (None, "stop")
        assert server.service.requests[-1].chat.tools == []


def test_a_cut_off_call_says_length(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says(CALLS[:60], reason="length")
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO, tools=[LOOK])
    assert reply.choices[0].finish_reason == "length"
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == "look"


def test_required_is_held_by_a_grammar(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says('[{"name": "look", "parameters": {"at": "sea"}}]')
    deep = tool("deep", properties={"x": {"$ref": "#/$defs/X"}}, **{"$defs": {"X": {"type": "integer"}}})
    reply = client.chat.completions.create(
        model="fake-omni", messages=HELLO, tools=[LOOK, deep], tool_choice="required", parallel_tool_calls=False
    )
    assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("tool_calls", None)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("look", '{"at": "sea"}')
    held = server.service.requests[-1].sampling["thinker"].structured_outputs
    assert held is not None
    assert isinstance(held.json, dict)
    assert (held.json["type"], held.json["minItems"], held.json["maxItems"]) == ("array", 1, 1)
    assert held.json["$defs"] == {"X": {"type": "integer"}}
    first, second = held.json["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "look"}, "parameters": LOOK["function"]["parameters"]}
    assert second["properties"]["parameters"] == {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}}


@pytest.mark.parametrize("text", ["[", '[{"na', '[{"name": "lo', '[{"name": "look'])
def test_a_call_that_is_cut_off_before_its_name_is_nothing(client: openai.OpenAI, server: Live, text: str) -> None:
    server.service.script = says(text, reason="length")
    asked: dict[str, Any] = {"model": "fake-omni", "messages": HELLO, "tools": [LOOK], "tool_choice": "required"}
    [choice] = client.chat.completions.create(**asked).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", None, None)
    with client.chat.completions.create(**asked, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert not any(delta.content or delta.tool_calls for delta in deltas)


def test_a_named_tool_is_held_to_its_arguments(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says('{"at": "sea"}')
    named: Any = {"type": "function", "function": {"name": "look"}}
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO, tools=[LOOK, WAIT], tool_choice=named)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [("look", '{"at": "sea"}')]
    held = server.service.requests[-1].sampling["thinker"].structured_outputs
    assert held is not None
    assert held.json == LOOK["function"]["parameters"]


def test_a_format_of_the_answer_does_not_hold_a_call_that_is_asked_for(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says('{"at": "sea"}')
    named: Any = {"type": "function", "function": {"name": "look"}}
    asked: dict[str, Any] = {"model": "fake-omni", "messages": HELLO, "tools": [LOOK], "tool_choice": named}
    reply = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert reply.choices[0].message.tool_calls
    held = server.service.requests[-1].sampling["thinker"].structured_outputs
    assert held is not None
    assert (held.json, held.json_object) == (LOOK["function"]["parameters"], None)
    with pytest.raises(openai.BadRequestError, match="another form"):
        client.chat.completions.create(**asked, extra_body={"structured_outputs": {"regex": "a"}})


def test_a_conversation_with_calls_goes_to_the_template(client: openai.OpenAI, server: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a ship"},
    ]
    client.chat.completions.create(model="fake-omni", messages=turns, tools=[LOOK])
    messages = server.service.requests[0].messages
    assert messages[1].extra["tool_calls"][0]["function"]["arguments"] == {"at": "sea"}, "as templates print it"
    assert (messages[2].role, messages[2].extra) == ("tool", {"tool_call_id": "c1"})


def test_marks_that_are_special_tokens_are_left_in_the_text(client: openai.OpenAI, server: Live) -> None:
    server.service.card.dialect = replace(HERMES, calls=CALL_FORMATS["mistral"])
    server.service.script = says('[TOOL_CALLS]look{"at": "sea"}')
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO, tools=[LOOK])
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert len(calls[0].id) == 9, "Mistral's template takes no other"
    assert server.service.requests[-1].sampling["thinker"].skip_special_tokens is False


@pytest.mark.parametrize(
    ("body", "param", "code", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "loook"}}}, "tool_choice.function.name",
         "invalid_value", "did you mean 'look'"),
        ({"tools": [LOOK, LOOK]}, "tools[1].function.name", "invalid_value", "used twice"),
        ({"tools": [tool("a", **{"$defs": {"X": {}}}), tool("b", **{"$defs": {"X": {"type": "null"}}})],
          "tool_choice": "required"}, "tools", "invalid_value", "defines 'X' differently"),
        ({"tools": [LOOK, tool("a", **{"$defs": 5})], "tool_choice": "required"},
         "tools[1].function.parameters.$defs", "invalid_value", "is 5; it must be an object"),
        ({"tools": [tool("a", definitions=None)], "tool_choice": "required"},
         "tools[0].function.parameters.definitions", "invalid_value", "it must be an object"),
        ({"tools": [tool("a", maximum=10**30)]}, "tools", "invalid_value", "too large"),
    ],
)  # fmt: skip
def test_wrong_tools_are_named(server: Live, body: dict[str, Any], param: str, code: str, says: str) -> None:
    whole = {"model": "fake-omni", "messages": HELLO, "tools": [LOOK], **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=whole, timeout=120)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert says in error["message"]


def test_a_model_whose_calls_are_unknown_says_so_unless_told(server: Live) -> None:
    server.service.card.dialect = Dialect(TEMPLATE)
    body = {"model": "fake-omni", "messages": HELLO, "tools": [LOOK]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert "--tool-parser" in answer.json()["error"]["message"]
    service = FakeService(says(CALLS))
    service.card.dialect = Dialect(TEMPLATE)
    with live(service, ServerSettings(tool_parser="hermes")) as told:
        reply = httpx.post(f"{told.url}/v1/chat/completions", json=body, timeout=120).json()
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 2


# ── reasoning ──────────────────────────────────────────────────────────────────────────────────────────────────────

THOUGHT = "<think>\nHm.\n</think>\n\nA ship."


def test_thoughts_stand_apart(client: openai.OpenAI, server: Live) -> None:
    server.service.script = says(THOUGHT)
    message = client.chat.completions.create(model="fake-omni", messages=HELLO).choices[0].message
    assert message.content == "A ship."
    assert message.model_extra is not None
    assert (message.model_extra["reasoning_content"], message.model_extra["reasoning"]) == ("Hm.", "Hm.")
    said, thought = "", ""
    for chunk in client.chat.completions.create(model="fake-omni", messages=HELLO, stream=True):
        delta = chunk.choices[0].delta
        said += delta.content or ""
        thought += (delta.model_extra or {}).get("reasoning_content", "")
    assert (said, thought) == ("A ship.", "Hm.")
    asked: dict[str, Any] = {"model": "fake-omni", "messages": HELLO}
    whole = client.chat.completions.create(**asked).usage
    *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for usage in (whole, last.usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 4
    message = (
        client.chat.completions.create(model="fake-omni", messages=HELLO, extra_body={"include_reasoning": False})
        .choices[0]
        .message
    )
    assert (message.content, message.model_extra) == ("A ship.", {"reasoning": None})


def test_a_thought_that_the_prompt_begins(client: openai.OpenAI, server: Live) -> None:
    template = ChatTemplate(
        "{% if add_generation_prompt %}{% if enable_thinking != false %}<think>{% endif %}{% endif %}"
    )
    server.service.card.dialect = Dialect(template, None, THINK)
    server.service.script = says("Hm.</think>A ship.")

    def ask(**extra: Any) -> tuple[str | None, str | None]:
        message = client.chat.completions.create(model="fake-omni", messages=HELLO, extra_body=extra).choices[0].message
        return message.content, (message.model_extra or {}).get("reasoning")

    assert ask() == ("A ship.", "Hm.")
    assert ask(chat_template_kwargs={"enable_thinking": False}) == ("Hm.</think>A ship.", None)
    assert server.service.requests[-1].chat.template_kwargs == {"enable_thinking": False}
    assert ask(reasoning_effort="none") == ("Hm.</think>A ship.", None)
    assert ask(reasoning_effort="high") == ("A ship.", "Hm.")


def test_template_options_go_along(server: Live) -> None:
    body = {"model": "fake-omni", "messages": HELLO, "continue_final_message": True}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).status_code == 200
    chat = server.service.requests[-1].chat
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    server.service.card.dialect = Dialect(ChatTemplate("{{ reasoning_effort }}"))
    httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "fake-omni", "messages": HELLO, "reasoning_effort": "low"},
        timeout=120,
    )
    assert server.service.requests[-1].chat.template_kwargs == {"reasoning_effort": "low"}
    wrong = {"model": "fake-omni", "messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=wrong, timeout=120)
    assert json.loads(answer.content)["error"]["param"] == "chat_template_kwargs.chat_template"
