"""`n` of a chat completion as one request with several outputs, where the text stage feeds no other."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from fake_service import Live, finished

from segue.messages.deltas import Choice, ChoiceEnded, Delta, Finished, RequestMetrics, TextDelta, Usage
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams

HELLO = [{"role": "user", "content": "Say hello"}]
LENGTHS = {0: 2, 1: 3, 2: 1}


async def several(request: Request) -> AsyncGenerator[Delta]:
    """Outputs of different lengths, in turns."""
    n = request.sampling["thinker"].n or 1
    for word in range(3):
        for index in range(n):
            if word < LENGTHS[index]:
                yield TextDelta("thinker", f"{index}{'abc'[word]}", [10 * index + word], index=index)
            if word + 1 == LENGTHS[index] and n > 1:
                yield ChoiceEnded("thinker", _choice(index))
    ids = [[10 * index + word for word in range(LENGTHS[index])] for index in range(n)]
    yield Finished(
        "stop",
        {"thinker": ids[0]},
        Usage(prompt_tokens=9, prompt_modalities={"text": 9}, completion_modalities={"text": sum(map(len, ids))}),
        RequestMetrics(jct=1.0),
        choices=[_choice(index) for index in range(n)],
    )


def _choice(index: int) -> Choice:
    ids = [10 * index + word for word in range(LENGTHS[index])]
    return Choice(index, "length" if index == 1 else "stop", ids)


@pytest.fixture
def server(server: Live) -> Live:
    server.service.card.several_texts = True
    server.service.script = several
    return server


def test_n_choices_are_one_request(client: openai.OpenAI, server: Live) -> None:
    reply = client.chat.completions.create(
        model="fake-omni", messages=HELLO, n=3, seed=2**64 - 2, extra_body={"return_token_ids": True}
    )
    assert [(one.index, one.message.content, one.finish_reason) for one in reply.choices] == [
        (0, "0a0b", "stop"), (1, "1a1b1c", "length"), (2, "2a", "stop"),
    ]  # fmt: skip
    ids = [one.model_extra["token_ids"] for one in reply.choices if one.model_extra]
    assert ids == [[0, 1], [10, 11, 12], [20]]
    [request] = server.service.requests
    assert (request.seed, request.sampling["thinker"].n) == (2**64 - 2, 3)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (9, 6)


def test_n_choices_stream_with_their_index(client: openai.OpenAI, server: Live) -> None:
    stream = client.chat.completions.create(
        model="fake-omni", messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    order: list[int] = []
    roles: list[int] = []
    ends: dict[int, str] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.role:
                roles.append(choice.index)
            if choice.delta.content:
                texts[choice.index] = texts.get(choice.index, "") + choice.delta.content
                order.append(choice.index)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {0: "0a0b", 1: "1a1b1c", 2: "2a"}
    assert order[:3] == [0, 1, 2]
    assert sorted(roles) == [0, 1, 2]
    assert ends == {0: "stop", 1: "length", 2: "stop"}
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 6)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("metrics", [False, True])
def test_a_choice_says_that_it_ends_when_it_does(server: Live, path: str, metrics: bool) -> None:
    """And once; with what is known only when all have ended, it says so then."""
    body: dict[str, Any] = {"model": "fake-omni", "n": 3, "stream": True, "return_token_ids": True}
    body |= {"prompt": "Say"} if path == "/v1/completions" else {"messages": HELLO}
    answer = httpx.post(server.url + path, json={**body, "return_metrics": metrics}, timeout=120)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    entries = [entry for line in lines[:-1] for entry in json.loads(line)["choices"]]
    order = [(entry["index"], entry["finish_reason"]) for entry in entries if entry["finish_reason"]]
    last_text = max(place for place, entry in enumerate(entries) if not entry["finish_reason"])
    ends = [place for place, entry in enumerate(entries) if entry["finish_reason"]]
    if metrics:
        assert order == [(0, "stop"), (1, "length"), (2, "stop")]
        assert min(ends) > last_text
        assert all("segue" in entries[place] for place in ends)
    else:
        assert order == [(2, "stop"), (0, "stop"), (1, "length")]
        assert [place < last_text for place in ends] == [True, True, False]
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for entry in entries:
        ids[entry["index"]] += entry["token_ids"] or []
    assert ids == {0: [0, 1], 1: [10, 11, 12], 2: [20]}


def test_with_audio_each_choice_is_a_request(client: openai.OpenAI, server: Live) -> None:
    async def one(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "x")
        yield finished()

    server.service.script = one
    client.chat.completions.create(
        model="fake-omni", messages=HELLO, n=2, modalities=["text", "audio"], audio={"voice": "Anna", "format": "wav"}
    )
    assert len(server.service.requests) == 2
    assert all(request.sampling == {} for request in server.service.requests)


def test_best_of_and_beams_are_sampling_of_the_text(client: openai.OpenAI, server: Live) -> None:
    asked: dict[str, Any] = {"beam_width": 4, "length_penalty": 0.5, "early_stopping": True}
    client.chat.completions.create(model="fake-omni", messages=HELLO, n=2, extra_body=asked)
    client.chat.completions.create(model="fake-omni", messages=HELLO, extra_body={"best_of": 3})
    first, second = server.service.requests
    assert first.sampling == {"thinker": SamplingParams(n=2, **asked)}
    assert second.sampling == {"thinker": SamplingParams(best_of=3)}


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "best_of is 2; it must be at least n (3)"),
        ({"n": 3, "beam_width": 2}, "beam_width", "beam_width is 2; it must be at least n (3)"),
        ({"beam_width": 17}, "beam_width", "beam_width is 17; it must be an integer from 1 to 16"),
        ({"beam_width": 4, "temperature": 0.7}, "temperature", "temperature is 0.7, but beam search"),
        ({"n": 129}, "n", "from 1 to 128"),
        ({"sampling": {"thinker": {"n": 2}}}, "sampling.thinker.n", "give n at the top of the request"),
    ],
)
def test_what_does_not_go_together(server: Live, fields: dict[str, Any], field: str, message: str) -> None:
    body = {"model": "fake-omni", "messages": HELLO, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert message in error["message"]
    assert not server.service.requests
