"""`/v1/completions`: the official client, lm-eval's requests, and those of vLLM's benchmark."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_service import FakeService, Gate, Live, finished, live, speak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.messages.deltas import Choice, Delta, TextDelta, TokenLogprobs, TokensDelta, TopToken
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.server.generation.generations import AT_ONCE, BYTES_PER_TURN, PER_TURN, run_generations

PATH = "/v1/completions"
SHARED = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
"""One server for all examples."""


def top(token: int, logprob: float, text: str, rank: int = 1) -> TopToken:
    return TopToken(token, logprob, rank, text, text.encode())


def scored(text: str, logprob: float) -> TokenLogprobs:
    """A token that was the second best."""
    return TokenLogprobs(top(ord(text), logprob, text, 2), [top(1, -0.25, "best")])


def letters(request: Request) -> list[int]:
    return request.prompt_token_ids or [100 + ord(letter) for letter in request.prompt or ""]


async def letterwise(request: Request) -> AsyncGenerator[Delta]:
    """Says `ab` for every output, the second output first; an id is a letter's code plus 100."""
    sampling = request.sampling["thinker"]
    ids = letters(request)
    text = "".join(chr(token - 100) for token in ids)
    for index in reversed(range(sampling.n or 1)):
        for place, letter in enumerate("ab"):
            begins = index == 0 and place == 0
            asked_prompt = begins and sampling.prompt_logprobs is not None
            yield TextDelta(
                "thinker",
                letter,
                [ord(letter)],
                index=index,
                logprobs=[scored(letter, -1.5)] if sampling.logprobs is not None else [],
                prompt_token_ids=ids if begins and request.return_prompt_ids else [],
                prompt_logprobs=[None, *(scored(one, -2.0) for one in text[1:])] if asked_prompt else [],
            )
    if "tokens" in request.modalities:  # late: what waits for it must be held back
        yield TokensDelta("input", ids, [f"<{letter}>" for letter in text], text)
    end = finished()
    choices = [Choice(index, "length" if index else "stop", [97, 98], None, "!") for index in range(sampling.n or 1)]
    yield type(end)(end.finish_reason, end.token_ids, end.usage, end.metrics, choices=choices)


@pytest.fixture
def server(server: Live) -> Live:
    server.service.card.several_texts = True
    server.service.script = speak
    return server


def ask(server: Live, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + PATH, json={"model": "fake-omni", **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: Live, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream(
        "POST", server.url + PATH, json={"model": "fake-omni", "stream": True, **body}, timeout=120
    ) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_text(client: openai.OpenAI, server: Live) -> None:
    reply = client.completions.create(model="fake-omni", prompt="Say")
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    [choice] = reply.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello, world", "stop", None)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (10, 5)
    [request] = server.service.requests
    assert (request.prompt, request.prompt_token_ids, request.messages) == ("Say", None, [])
    assert request.modalities == ["text"]
    assert request.sampling["thinker"].max_tokens == 16, "OpenAI's default"
    assert request.sampling["thinker"].logprobs is None


def test_sampling_goes_along(client: openai.OpenAI, server: Live) -> None:
    client.completions.create(
        model="fake-omni",
        prompt=[5, 6, 7],
        max_tokens=3,
        temperature=0.5,
        stop=["x"],
        seed=9,
        logit_bias={"5": 2},
        presence_penalty=0.5,
        user="me",
        extra_body={"top_k": 4, "ignore_eos": True, "min_tokens": 1, "add_special_tokens": False, "priority": 2,
                    "bad_words": ["no"], "truncate_prompt_tokens": 2, "suffix": None},
    )  # fmt: skip
    [request] = server.service.requests
    params = request.sampling["thinker"]
    assert request.prompt_token_ids == [5, 6, 7]
    assert (params.max_tokens, params.temperature, params.stop, params.logit_bias) == (3, 0.5, ["x"], {5: 2.0})
    assert (params.top_k, params.ignore_eos, params.min_tokens, params.bad_words) == (4, True, 1, ["no"])
    assert params.truncate_prompt_tokens == 2
    assert (request.seed, request.add_special_tokens, request.priority) == (9, False, 2)


@pytest.mark.parametrize("as_one", [True, False])
def test_every_prompt_gets_its_group_of_choices(server: Live, client: openai.OpenAI, as_one: bool) -> None:
    server.service.card.several_texts = as_one
    server.service.script = letterwise
    reply = client.completions.create(model="fake-omni", prompt=["one", "two"], n=2, echo=True, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["oneab", "oneab", "twoab", "twoab"]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 20, "each prompt once"
    requests = server.service.requests
    if as_one:
        assert [choice.finish_reason for choice in reply.choices] == ["stop", "length", "stop", "length"]
        assert (reply.choices[0].model_extra or {})["stop_reason"] == "!"
        assert [(request.prompt, request.seed, request.sampling["thinker"].n) for request in requests] == [
            ("one", 7, 2), ("two", 7, 2),
        ]  # fmt: skip
    else:
        assert sorted((request.prompt, request.seed) for request in requests) == [
            ("one", 7), ("one", 8), ("two", 7), ("two", 8),
        ]  # fmt: skip


def test_logprobs_in_the_legacy_form(client: openai.OpenAI, server: Live) -> None:
    server.service.script = letterwise
    reply = client.completions.create(model="fake-omni", prompt="xy", logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-1.5, -1.5]
    assert logprobs.top_logprobs == [{"best": -0.25, "a": -1.5}, {"best": -0.25, "b": -1.5}]
    assert logprobs.text_offset == [0, 1]
    [request] = server.service.requests
    assert (request.sampling["thinker"].logprobs, request.sampling["thinker"].prompt_logprobs) == (1, None)


@pytest.mark.parametrize("prompt", ["xyz", [220, 221, 222]])
def test_echo_with_logprobs_has_the_prompt_s_too(server: Live, prompt: str | list[int]) -> None:
    server.service.script = letterwise
    [choice] = ask(server, prompt=prompt, logprobs=1, echo=True)["choices"]
    assert choice["text"] == "xyzab"
    assert choice["logprobs"]["tokens"] == ["x", "y", "z", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0, -1.5, -1.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_echo_alone_needs_no_token_for_the_client(server: Live) -> None:
    server.service.script = letterwise
    answer = ask(server, prompt="xy", echo=True, max_tokens=0, logprobs=0)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("xy", "length", ["x", "y"])
    assert answer["usage"]["completion_tokens"] == 0
    assert server.service.requests[0].sampling["thinker"].max_tokens == 1


def test_token_ids_of_prompt_and_text(server: Live) -> None:
    server.service.script = letterwise
    [first, second] = ask(server, prompt="xy", return_token_ids=True, n=2)["choices"]
    assert first["prompt_token_ids"] == second["prompt_token_ids"] == [220, 221]
    assert first["token_ids"] == second["token_ids"] == [97, 98]
    chunks = stream(server, prompt="xy", return_token_ids=True)
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [[], [97], [98], None]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [220, 221]


def test_prompt_logprobs_as_vllm_has_them(server: Live) -> None:
    server.service.script = letterwise
    [choice] = ask(server, prompt="xy", prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["1"] == {"logprob": -0.25, "rank": 1, "decoded_token": "best"}


# ── streams ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_streaming(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="fake-omni", prompt="Say", stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].text for chunk in chunks if chunk.choices] == ["Hello", ", ", "world", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, None, None, "stop"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * 4 + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


@settings(SHARED, max_examples=30)
@given(
    prompt=st.sampled_from(["xy", [220, 221], ["x", "yz"], [[220], [221, 222]]]),
    n=st.integers(1, 3),
    echo=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
    return_token_ids=st.booleans(),
    max_tokens=st.sampled_from([None, 0, 4]),
    as_one=st.booleans(),
)
def test_the_pieces_of_a_stream_make_the_whole(
    running: Live, as_one: bool, echo: bool, max_tokens: int | None, **body: Any
) -> None:
    running.service.script = letterwise
    running.service.card.several_texts = as_one
    body |= {"echo": echo, "max_tokens": max_tokens if echo else None}
    whole = ask(running, **body)
    pieces = stream(running, **body, stream_options={"include_usage": True})
    assert pieces[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [entry for piece in pieces for entry in piece["choices"] if entry["index"] == choice["index"]]
        assert "".join(entry["text"] for entry in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert [token for entry in mine for token in entry["token_ids"] or []] == (choice["token_ids"] or [])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [one for entry in mine if entry["logprobs"] for one in entry["logprobs"][name]]
            assert told == (choice["logprobs"][name] if choice["logprobs"] else [])


def test_an_error_after_the_first_event_is_the_last_one(server: Live) -> None:
    async def breaks(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "a", [5])
        raise StageFailed("no more", stage="thinker")

    server.service.script = breaks
    with httpx.stream(
        "POST", server.url + PATH, json={"model": "fake-omni", "prompt": "a", "stream": True}, timeout=120
    ) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["stage"] == "thinker"


# ── other people's clients ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_lm_eval_asks_and_how_it_reads_the_answer(server: Live) -> None:
    """`TemplateAPI` with `local-completions`: contexts and continuations as ids, several prompts at once."""
    server.service.script = letterwise
    contexts, prompts = [2, 1], [[220, 221, 222], [200, 221]]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = ask(server, **body)
    read = []
    for choice, length in zip(sorted(answer["choices"], key=lambda one: one["index"]), contexts, strict=True):
        # one token was asked for; the fake gives two
        logprobs = choice["logprobs"]["token_logprobs"][length:-2]
        tops = choice["logprobs"]["top_logprobs"][length:-2]
        read.append((sum(logprobs), all(one == max(best.values()) for one, best in zip(logprobs, tops, strict=True))))
    assert read == [(-2.0, False), (-2.0, False)]


def test_what_vllm_s_benchmark_asks_and_how_it_reads_the_answer(server: Live) -> None:
    body = {
        "prompt": "Say", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "ignore_eos": True,
        "temperature": 0.0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, tokens, timed = "", 0, 0
    for data in stream(server, **body):
        if choices := data.get("choices"):
            text += choices[0].get("text") or ""
            timed += 1
        elif usage := data.get("usage"):
            tokens = usage["completion_tokens"]
            assert usage["prompt_tokens"] == 10
    assert (text, tokens) == ("Hello, world", 5)
    assert timed == 4, "one per delta, and the end"


def test_tokens_without_text_are_told(server: Live) -> None:
    """Half a character has no text yet, but a client that takes times must hear of its token."""

    async def halves(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "", [5])
        yield TextDelta("thinker", "é", [6])
        yield finished()

    server.service.script = halves
    assert [chunk["choices"][0]["text"] for chunk in stream(server, prompt="x")] == ["", "é", ""]


@pytest.mark.parametrize("prompt", ["see <image>", [7, 8]])
def test_media_go_beside_a_prompt(server: Live, prompt: str | list[int]) -> None:
    ask(server, prompt=prompt, multi_modal_data={"image": ["data:,a", "data:,b"], "audio": "data:,c"})
    [request] = server.service.requests
    assert request.prompt == (prompt if isinstance(prompt, str) else None)
    assert request.prompt_token_ids == (None if isinstance(prompt, str) else prompt)
    assert [(part.kind, part.data) for part in request.media()] == [("image", b"a"), ("image", b"b"), ("audio", b"c")]


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt[0]", "at least one"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": [-1]}, "prompt", "list of token ids"),
        ({"prompt": [1, "a"]}, "prompt[0]", "must be texts, or all lists of ids, or all ids"),
        ({"prompt": ["a", [1]]}, "prompt[1]", "must be texts, or all lists of ids, or all ids"),
        ({"prompt": 5}, "prompt", "prompt is 5"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "does not support"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "expected int"),
        ({"prompt": "a", "logprobs": -2}, "logprobs", "-1 for all"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "unless echo"),
        ({"prompt": "a", "echo": True, "truncate_prompt_tokens": 3}, "echo", "give one"),
        ({"prompt": "a", "messages": []}, "messages", "unknown parameter"),
        (
            {"prompt": ["a", "b"], "multi_modal_data": {"image": "data:,a"}},
            "multi_modal_data",
            "prompt has 2 prompts; send one",
        ),
        (
            {"prompt_embeds": "AAAA", "multi_modal_data": {"image": "data:,a"}},
            "multi_modal_data",
            "prompt_embeds have no place for it",
        ),
        ({"prompt": "a", "multi_modal_data": {"image": 5}}, "multi_modal_data", "str"),
        ({"prompt": "a", "multi_modal_data": {"pdf": "data:,a"}}, "multi_modal_data.pdf", "no kind of media"),
        ({"prompt": "a", "multi_modal_data": {"image": ["data:,a", "x.png"]}}, "multi_modal_data.image[1]", "no files"),
        ({"prompt": "a", "n": 129}, "n", "from 1 to 128"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "cannot be streamed"),
    ],
)
def test_a_wrong_parameter_is_named(server: Live, body: dict[str, Any], param: str, says: str) -> None:
    answer = httpx.post(server.url + PATH, json={"model": "fake-omni", **body}, timeout=120)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert server.service.requests == []


@pytest.mark.parametrize(
    ("prompt", "raised", "param"),
    [
        ([7, 99], "prompt_token_ids[1]", "prompt[1]"),
        ([[7], [7, 99]], "prompt_token_ids[1]", "prompt[1][1]"),
        ([[7], [99]], "prompt_token_ids", "prompt[1]"),
        (["a", "z"], "prompt", "prompt[1]"),
        ("z", "prompt", "prompt"),
    ],
)
def test_what_a_stage_says_of_a_prompt(server: Live, prompt: Any, raised: str, param: str) -> None:
    """The client wrote `prompt`, and knows no other name for it."""

    async def refuse(request: Request) -> AsyncGenerator[Delta]:
        if 99 in (request.prompt_token_ids or []) or request.prompt == "z":
            raise InvalidRequest(f"{raised} is no good", field=raised)
        async for delta in speak(request):
            yield delta

    server.service.script = refuse
    answer = httpx.post(server.url + PATH, json={"model": "fake-omni", "prompt": prompt}, timeout=120)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param} is no good")


def test_how_many_log_probabilities_is_up_to_the_stage(server: Live) -> None:
    async def refuse(request: Request) -> AsyncGenerator[Delta]:
        if False:
            yield finished()
        field = "sampling.thinker.prompt_logprobs"
        raise InvalidRequest(f"{field} asks for {request.sampling['thinker'].prompt_logprobs}", field=field)

    server.service.script = refuse
    body = {"model": "fake-omni", "prompt": "a", "echo": True, "logprobs": 50}
    error = httpx.post(server.url + PATH, json=body, timeout=120).json()["error"]
    assert (error["param"], error["message"]) == ("logprobs", "logprobs asks for 50")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
_FUZZED = {
    "/v1/completions": ("prompt", "echo", "logprobs", "max_tokens", "n", "best_of", "stream", "suffix", "seed", "stop"),
    "/v1/chat/completions": ("tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "messages"),
    "/tokenize": ("prompt", "messages", "tools", "add_special_tokens", "continue_final_message"),
    "/detokenize": ("tokens",),
}


@pytest.mark.slow
@settings(SHARED, max_examples=200)
@given(path=st.sampled_from(sorted(_FUZZED)), data=st.data())
def test_no_body_makes_a_500(running: Live, path: str, data: st.DataObject) -> None:
    running.service.script = speak
    body: dict[str, Any] = {"model": "fake-omni"}
    if path == "/v1/completions":
        body["prompt"] = "a"
    elif path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "x"}]
    body |= data.draw(st.dictionaries(st.sampled_from(_FUZZED[path]), _JSON, max_size=3))
    content = json.dumps(body).encode()
    answer = httpx.post(running.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=120)
    assert answer.status_code < 500, answer.text


def test_another_model_is_404_and_a_model_without_text_is_refused(server: Live) -> None:
    body = {"model": "other", "prompt": "a"}
    assert httpx.post(server.url + PATH, json=body, timeout=120).json()["error"]["code"] == "model_not_found"
    service = FakeService()
    service.card.text_stage = None
    with live(service) as silent:
        answer = httpx.post(silent.url + PATH, json={"model": "fake-omni", "prompt": "a"}, timeout=120).json()
    assert answer["error"]["code"] == "unsupported_parameter"


def test_prompts_begin_in_turns_and_by_the_servers_deadline() -> None:
    """Of more than `AT_ONCE` prompts the others wait until one has ended; and none takes longer than the server lets
    it."""
    gate = Gate()

    async def held(request: Request) -> AsyncGenerator[Delta]:
        await gate.wait()
        yield TextDelta("thinker", "a", [5])
        yield finished()

    service = FakeService(held)
    service.card.deadline = 1000.0
    before = time.time()
    with (
        live(service) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(http.post, PATH, json={"prompt": ["x"] * (2 * AT_ONCE + 5)})
        while len(service.requests) < AT_ONCE:
            assert http.get("/health").status_code == 200
        for _ in range(5):
            assert http.get("/health").status_code == 200
        assert len(service.requests) == AT_ONCE
        gate.open()
        answer = asked.result().json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * AT_ONCE + 5))
    assert all(before < (request.deadline or 0) - 1000 < time.time() for request in service.requests)


@pytest.mark.parametrize(("prompt", "turns"), [("x", 1), ("x" * BYTES_PER_TURN, PER_TURN)])
def test_large_prompts_begin_one_per_turn(prompt: str, turns: int) -> None:
    """Each is encoded on the event loop, where other requests wait."""

    async def begun_in() -> set[int]:
        turn, seen = 0, set[int]()

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        async def note(request: Request) -> AsyncGenerator[Delta]:
            seen.add(turn)
            yield finished()

        counting = asyncio.create_task(count())
        requests = [Request(request_id=str(index), prompt=prompt) for index in range(PER_TURN)]
        ended = [one async for one, _ in run_generations(FakeService(note), requests, ServerMetrics(), {})]
        counting.cancel()
        assert sorted(ended) == list(range(PER_TURN))
        return seen

    assert len(asyncio.run(begun_in())) == turns
