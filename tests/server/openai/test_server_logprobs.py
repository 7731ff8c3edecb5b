"""Log-probabilities in chat completions, as the official client reads them."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Iterator

import httpx
import openai
import pytest
from fake_service import FakeService, Live, finished, live

from segue.messages.deltas import Delta, TextDelta, TokenLogprobs, TopToken
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams

HELLO = [{"role": "user", "content": "Say hello"}]
SEA = "海".encode()


def token(token_id: int, text: str, data: bytes, share: float, rank: int = 1) -> TopToken:
    return TopToken(token_id, math.log(share), rank, text, data)


WHAT = [
    TokenLogprobs(token(5, "The", b"The", 0.5), [token(5, "The", b"The", 0.5), token(8, " A", b" A", 0.25, 2)]),
    TokenLogprobs(token(6, "\ufffd", SEA[:2], 0.5), [token(6, "\ufffd", SEA[:2], 0.5)]),
    TokenLogprobs(token(7, "\ufffd", SEA[2:], 0.5), []),
    TokenLogprobs(token(1, "<|end|>", b"", 0.5), []),
]


async def told(request: Request) -> AsyncGenerator[Delta]:
    params = request.sampling.get("thinker", SamplingParams())
    prompt = [None, WHAT[0]] if params.prompt_logprobs is not None else []
    told = WHAT if params.logprobs is not None or params.logprob_token_ids else []
    yield TextDelta("thinker", "The", [5], logprobs=told[:1], prompt_logprobs=prompt)
    yield TextDelta("thinker", "", [6], logprobs=told[1:2])
    yield TextDelta("thinker", "海", [7, 1], logprobs=told[2:])
    yield finished()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeService(told)) as server:
        yield server


def test_whole(client: openai.OpenAI, server: Live) -> None:
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO, logprobs=True, top_logprobs=2)
    assert server.service.requests[-1].sampling["thinker"].logprobs == 2
    told = reply.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [(one.token, one.bytes) for one in told.content] == [
        ("The", list(b"The")), ("\ufffd", list(SEA[:2])), ("\ufffd", list(SEA[2:])), ("<|end|>", None),
    ]  # fmt: skip
    assert bytes(byte for one in told.content for byte in one.bytes or []).decode() == "The海"
    assert all(one.logprob == pytest.approx(math.log(0.5)) for one in told.content)
    assert [(one.token, one.bytes) for one in told.content[0].top_logprobs] == [
        ("The", list(b"The")), (" A", list(b" A")),
    ]  # fmt: skip


def test_asked_for_by_token(server: Live) -> None:
    """Over both endpoints, as from Python: without another word."""
    body = {"model": "fake-omni", "logprob_token_ids": [8]}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "messages": HELLO}, timeout=120).json()
    assert [one["token"] for one in reply["choices"][0]["logprobs"]["content"]][:1] == ["The"]
    for stream in (False, True):
        asked = {**body, "prompt": "Say", "stream": stream}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line and "[DONE]" not in line]
        told = [log for line in lines if (log := json.loads(line)["choices"][0]["logprobs"]) is not None]
        assert told[0]["tokens"][:1] == ["The"]
        assert told[0]["top_logprobs"][0].keys() == {"The", " A"}


def test_streamed(client: openai.OpenAI) -> None:
    pieces = list(client.chat.completions.create(model="fake-omni", messages=HELLO, logprobs=True, stream=True))
    told = [one.token for piece in pieces if (log := piece.choices[0].logprobs) for one in log.content or []]
    assert told == ["The", "\ufffd", "\ufffd", "<|end|>"]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "The海"


@pytest.mark.parametrize("stream", [False, True])
def test_not_asked_for(server: Live, stream: bool) -> None:
    body = {"model": "fake-omni", "messages": HELLO, "stream": stream, "logprobs": False, "top_logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200
    assert '"logprobs":null' in answer.text
    assert "top_logprobs" not in answer.text


def test_of_the_prompt(server: Live) -> None:
    body = {"model": "fake-omni", "messages": HELLO, "prompt_logprobs": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    nothing, first = answer["prompt_logprobs"]
    assert nothing is None
    assert first["5"] == {"logprob": pytest.approx(math.log(0.5)), "rank": 1, "decoded_token": "The"}
    assert first["8"]["rank"] == 2


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "at least 0, or -1"),
        ({"logprobs": 3}, "logprobs", "expected bool"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "-1 for all"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids", "no token id"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"allowed_token_ids": [3], "suppress_tokens": [3]}, "allowed_token_ids", "no token is left"),
        ({"bad_words": ["a", ""]}, "bad_words", "empty string"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1"),
    ],
)
def test_wrong_values_are_named(server: Live, body: dict[str, object], param: str, word: str) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "fake-omni", "messages": HELLO, **body}, timeout=120
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert word in answer.json()["error"]["message"]
