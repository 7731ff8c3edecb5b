"""What vLLM's clients send and read besides OpenAI's: taken, or refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fake_service import FakeService, Live, finished, live

from segue.messages.deltas import Choice, Delta, TextDelta, TokenLogprobs, TokensDelta, TopToken
from segue.messages.request import Request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake-omni", "messages": [{"role": "user", "content": "Say"}]},
    COMPLETIONS: {"model": "fake-omni", "prompt": "Say"},
}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def scored(token_id: int, text: str) -> TokenLogprobs:
    token = TopToken(token_id, -0.5, 1, text, text.encode())
    return TokenLogprobs(token, [token])


async def says(request: Request) -> AsyncGenerator[Delta]:
    """Two tokens of one letter each, after a prompt of three."""
    if "tokens" in request.modalities:
        yield TokensDelta("input", [7, 8, 9], ["S", "a", "y"], "Say")
    params = request.sampling.get("thinker")
    asked = params is not None and params.logprobs is not None
    echoed = params is not None and params.prompt_logprobs is not None
    for place, letter in enumerate("ab"):
        yield TextDelta(
            "thinker",
            letter,
            [5 + place],
            logprobs=[scored(5 + place, letter)] if asked else [],
            prompt_token_ids=[7, 8, 9] if place == 0 and request.return_prompt_ids else [],
            prompt_logprobs=[None, scored(8, "a"), scored(9, "y")] if place == 0 and echoed else [],
        )
    outputs = 1 if params is None else params.n or 1
    choices = [Choice(index, "stop", [5, 6], None, "!") for index in range(outputs)]
    yield msgspec.structs.replace(finished(), choices=choices)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeService(says)) as server:
        server.service.card.several_texts = True
        yield server


def ask(server: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={**ASKED[path], **body}, timeout=120)


def answer(server: Live, path: str, **body: Any) -> dict[str, Any]:
    reply = ask(server, path, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(server: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = ask(server, path, stream=True, **body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]


@BOTH
def test_a_choice_says_what_stopped_it(server: Live, path: str) -> None:
    assert answer(server, path)["choices"][0]["stop_reason"] == "!"
    assert events(server, path)[-1]["choices"][0]["stop_reason"] == "!"


@BOTH
def test_the_client_s_own_id_is_in_the_answer_s(server: Live, path: str) -> None:
    for _ in range(2):
        reply = answer(server, path, request_id="mine-1")
        assert reply["id"] == ("chatcmpl-mine-1" if path == CHAT else "cmpl-mine-1")
    ids = [request.request_id for request in server.service.requests[-2:]]
    assert len(set(ids)) == 2, "the same name twice is two requests"


@BOTH
def test_tokens_by_their_ids(server: Live, path: str) -> None:
    asked = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    told = answer(server, path, return_tokens_as_token_ids=True, **asked)["choices"][0]["logprobs"]
    if path == CHAT:
        assert [one["token"] for one in told["content"]] == ["token_id:5", "token_id:6"]
        assert told["content"][0]["top_logprobs"][0]["token"] == "token_id:5"
        assert told["content"][0]["bytes"] == [97]
    else:
        assert told["tokens"] == ["token_id:5", "token_id:6"]
        assert told["top_logprobs"] == [{"token_id:5": -0.5}, {"token_id:6": -0.5}]
        assert told["text_offset"] == [0, 1]


def test_the_tokens_of_an_echo_by_their_ids(server: Live) -> None:
    told = answer(server, COMPLETIONS, return_tokens_as_token_ids=True, logprobs=1, echo=True)["choices"][0]
    assert told["text"] == "Sayab"
    assert told["logprobs"]["tokens"] == [f"token_id:{token}" for token in (7, 8, 9, 5, 6)]
    assert told["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_the_prompt_s_ids_in_a_chat(server: Live) -> None:
    assert answer(server, CHAT, return_token_ids=True)["prompt_token_ids"] == [7, 8, 9]
    told = [event.get("prompt_token_ids") for event in events(server, CHAT, return_token_ids=True)]
    assert [ids for ids in told if ids is not None] == [[7, 8, 9]]
    assert answer(server, CHAT)["prompt_token_ids"] is None


@BOTH
def test_usage_as_it_grows(server: Live, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *told, last = events(server, path, stream_options=options)
    totals = [event["usage"]["completion_tokens"] for event in told]
    assert totals == sorted(totals)
    assert {1, 2} <= set(totals)
    if path == CHAT:
        assert (told[0]["choices"][0]["delta"], totals[0]) == ({"role": "assistant", "content": ""}, 0)
    assert {event["usage"]["prompt_tokens"] for event in told} == {3}
    assert all(event["usage"]["total_tokens"] == event["usage"]["completion_tokens"] + 3 for event in told)
    assert last["choices"] == []
    assert all(event["usage"] is None for event in events(server, path, stream_options={"include_usage": True})[:-1])
    without = events(server, path, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert not any("usage" in event for event in without)
    assert events(server, path, stream_options={"continuous_usage_stats": True})[-1]["usage"]["total_tokens"] == 15


@BOTH
@pytest.mark.parametrize(
    ("body", "beams", "n"),
    [
        ({}, 1, None),
        ({"n": 3}, 3, 3),
        ({"n": 2, "best_of": 5}, 5, 2),
        ({"n": 2, "beam_width": 4}, 4, 2),
    ],
)
def test_beam_search_in_vllm_s_words(server: Live, path: str, body: dict[str, int], beams: int, n: int | None) -> None:
    assert ask(server, path, use_beam_search=True, **body).status_code == 200
    params = server.service.requests[-1].sampling["thinker"]
    assert (params.beam_width, params.n, params.best_of) == (beams, n, None)


@BOTH
def test_a_salt_goes_along(server: Live, path: str) -> None:
    answer(server, path, cache_salt="mine")
    assert server.service.requests[-1].cache_salt == "mine"
    answer(server, path)
    assert server.service.requests[-1].cache_salt is None


@BOTH
@pytest.mark.parametrize(
    ("name", "value", "nothing"),
    [
        ("vllm_xargs", {"a": 1}, {}),
        ("routed_experts_prompt_start", 3, 0),
    ],
)
def test_what_cannot_be_honoured_is_refused(server: Live, path: str, name: str, value: object, nothing: object) -> None:
    refused = ask(server, path, **{name: value})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)
    answer(server, path, **{name: nothing})


@BOTH
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"request_id": "two words"}, "visible ASCII"),
        ({"request_id": ""}, "visible ASCII"),
        ({"cache_salt": ""}, "1 to 1024"),
        ({"cache_salt": "x" * 1025}, "1 to 1024"),
    ],
)
def test_wrong_values_are_named(server: Live, path: str, body: dict[str, str], word: str) -> None:
    refused = ask(server, path, **body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, next(iter(body)))
    assert word in error["message"]


@BOTH
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_ids_without_text(server: Live, path: str, fields: dict[str, Any]) -> None:
    asked = ask(server, path, detokenize=False, return_token_ids=True, **fields)
    assert asked.status_code == 200, asked.text
    assert server.service.requests[-1].sampling["thinker"].detokenize is False
    refused = ask(server, path, detokenize=False, **fields).json()["error"]
    assert (refused["param"], "return_token_ids" in refused["message"]) == ("detokenize", True)
    stopped = ask(server, path, detokenize=False, return_token_ids=True, stop="x", **fields).json()["error"]
    assert stopped["param"] == "detokenize"


@BOTH
def test_no_spaces_between_special_tokens(server: Live, path: str) -> None:
    """They are left out, or stand as the tokenizer writes them."""
    assert ask(server, path, spaces_between_special_tokens=False).status_code == 200
    refused = ask(server, path, spaces_between_special_tokens=False, skip_special_tokens=False)
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "spaces_between_special_tokens")


@BOTH
def test_how_long_and_how_often(server: Live, path: str) -> None:
    pattern = {"max_pattern_size": 4, "min_count": 3}
    assert ask(server, path, thinking_token_budget=7, repetition_detection=pattern).status_code == 200
    params = server.service.requests[-1].sampling["thinker"]
    assert params.thinking_token_budget == 7
    assert msgspec.to_builtins(params.repetition_detection) == pattern
    for wrong, field in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_size": 2}}, "repetition_detection"),
    ):
        error = ask(server, path, **wrong).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", field) or error["param"] == field, error


@BOTH
@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_a_model_that_is_not_named_is_the_one_that_is_served(server: Live, path: str, named: dict[str, Any]) -> None:
    body = {name: value for name, value in ASKED[path].items() if name != "model"}
    reply = httpx.post(server.url + path, json={**body, **named}, timeout=120)
    assert (reply.status_code, reply.json()["model"]) == (200, "fake-omni"), reply.text


@BOTH
def test_the_header_names_the_answer_where_the_body_does_not(server: Live, path: str) -> None:
    def asked(header: str, **body: Any) -> str:
        headers = {"X-Request-Id": header}
        return httpx.post(server.url + path, json={**ASKED[path], **body}, headers=headers, timeout=120).json()["id"]

    prefix = "chatcmpl" if path == CHAT else "cmpl"
    assert asked("mine-1") == f"{prefix}-mine-1"
    assert asked("mine-1", request_id="yours") == f"{prefix}-yours"
    assert asked("two words") not in (f"{prefix}-two words", f"{prefix}-mine-1")


def test_the_text_s_ids_in_a_chat(server: Live) -> None:
    """As vLLM has them: a list, and in a stream those of each event."""
    assert answer(server, CHAT, return_token_ids=True)["choices"][0]["token_ids"] == [5, 6]
    told = [event["choices"][0].get("token_ids") for event in events(server, CHAT, return_token_ids=True)]
    assert [ids for ids in told if ids is not None] == [[5], [6]]
    assert answer(server, CHAT)["choices"][0]["token_ids"] is None


@BOTH
def test_a_form_with_all_fields_of_vllm_s_object(server: Live, path: str) -> None:
    whole = {
        "json": None, "regex": "a+", "choice": None, "grammar": None, "json_object": None, "structural_tag": None,
        "disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None,
        "_backend": None, "_backend_was_auto": False,
    }  # fmt: skip
    assert ask(server, path, structured_outputs=whole).status_code == 200
    form = server.service.requests[-1].sampling["thinker"].structured_outputs
    assert form is not None
    assert form.regex == "a+"
    refused = ask(server, path, structured_outputs={**whole, "whitespace_pattern": " "}).json()["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "structured_outputs.whitespace_pattern")


def test_keys_of_vllm_s_answers_that_are_null_are_there(server: Live) -> None:
    whole = {"service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"}
    chat, completion = answer(server, CHAT), answer(server, COMPLETIONS)
    assert null(chat) >= {*whole, "prompt_logprobs", "prompt_token_ids"}
    assert null(completion) >= whole
    assert null(chat["choices"][0]) >= {"logprobs", "token_ids"}
    assert null(chat["choices"][0]["message"]) == {"refusal", "annotations", "audio", "function_call", "reasoning"}
    assert null(completion["choices"][0]) >= {"logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids"}
    assert null(events(server, CHAT)[0]) == {"prompt_token_ids"}
    assert null(events(server, COMPLETIONS)[0]["choices"][0]) >= {"prompt_token_ids", "token_ids", "stop_reason"}


def null(values: dict[str, Any]) -> set[str]:
    return {name for name, value in values.items() if value is None}


def test_a_medium_with_a_name_of_its_own(server: Live) -> None:
    """vLLM's `uuid`: taken beside the data, and refused in its place."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "a-1"}
    assert ask(server, CHAT, messages=[{"role": "user", "content": [part]}]).status_code == 200
    refused = ask(server, CHAT, messages=[{"role": "user", "content": [{**part, "image_url": None}]}])
    assert refused.status_code == 400
    assert "messages[0].content[0].image_url is missing; the server stores" in refused.json()["error"]["message"]
