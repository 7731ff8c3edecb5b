"""`/v1/chat/completions` driven by the official client over a real socket."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import wave
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from fake_service import RATE, FakeService, Gate, Live, audio, finished, live, samples, speak
from PIL import Image

from segue.media.encode import pcm16
from segue.messages.deltas import Delta, TextDelta
from segue.messages.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, StageFailed, StageLost
from segue.messages.request import MediaPart, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.server.settings import ServerSettings

HELLO = [{"role": "user", "content": "Say hello"}]


# ---- whole


def test_text(client: openai.OpenAI, server: Live) -> None:
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "fake-omni"
    [choice] = reply.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content, choice.message.audio) == ("assistant", "Hello, world", None)
    [request] = server.service.requests
    assert request.messages[0].content == [TextPart("Say hello")]
    assert request.modalities == ["text"]
    assert request.sampling == {}
    assert (request.seed, request.voice, request.deadline, request.priority) == (None, None, None, 0)


def test_usage_counts_every_modality(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model="fake-omni", messages=HELLO).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 5, 15)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.model_dump(exclude_none=True) == {
        "cached_tokens": 4, "text_tokens": 7, "image_tokens": 3,
    }  # fmt: skip
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.model_dump(exclude_none=True) == {
        "audio_tokens": 2, "text_tokens": 3, "reasoning_tokens": 0,
    }  # fmt: skip


def test_audio_comes_as_a_wav_with_its_transcript(client: openai.OpenAI, server: Live) -> None:
    reply = client.chat.completions.create(
        model="fake-omni", messages=HELLO, modalities=["text", "audio"], audio={"voice": "Ben", "format": "wav"}
    )
    message = reply.choices[0].message
    assert message.content == "Hello, world"
    assert message.audio is not None
    assert message.audio.transcript == "Hello, world"
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        frames = file.readframes(file.getnframes())
    assert frames == pcm16(np.concatenate([samples(i) for i in range(3)]))
    assert server.service.requests[0].voice == "Ben"
    assert message.audio.model_extra == {"format": "wav", "sample_rate": RATE}


@pytest.mark.parametrize("name", ["mp3", "flac", "opus", "aac", "pcm16"])
def test_audio_in_other_formats(client: openai.OpenAI, name: str) -> None:
    audio_options = {"voice": "Anna", "format": name}
    reply = client.chat.completions.create(
        model="fake-omni", messages=HELLO, modalities=["text", "audio"], audio=audio_options  # type: ignore[call-overload]
    )  # fmt: skip
    data = base64.b64decode(reply.choices[0].message.audio.data)
    magic = {"mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3"), "flac": (b"fLaC",), "opus": (b"OggS",), "aac": (b"\xff\xf1",)}
    assert data.startswith(magic.get(name, (b"",)))
    assert len(data) > 100


def test_audio_alone_has_no_content_and_may_be_silent(client: openai.OpenAI, server: Live) -> None:
    async def silent(request: Request) -> AsyncGenerator[Delta]:
        yield finished("length")

    server.service.script = silent
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO, modalities=["audio"])  # type: ignore[list-item]
    message = reply.choices[0].message
    assert message.content is None
    assert message.audio is not None
    assert len(base64.b64decode(message.audio.data)) == 44
    assert reply.choices[0].finish_reason == "length"


def test_images_come_as_png_data_urls(server: Live) -> None:
    body = {"model": "fake-omni", "messages": HELLO, "modalities": ["text", "image"]}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    [image] = reply["choices"][0]["message"]["images"]
    png = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(png)).tobytes() == bytes(range(12))


def test_media_of_every_kind_go_in(client: openai.OpenAI, server: Live) -> None:
    data = base64.b64encode(b"a file").decode()
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
    ]
    client.chat.completions.create(model="fake-omni", messages=[{"role": "user", "content": content}])  # type: ignore[list-item,misc]
    [request] = server.service.requests
    assert request.messages[0].content == [
        TextPart("What is this?"),
        *(
            MediaPart(kind, b"a file", field=f"messages[0].content[{index}]")  # type: ignore[arg-type]
            for index, kind in enumerate(("image", "audio", "video"), start=1)
        ),
    ]


def test_a_completion_goes_on_from_a_stored_one(client: openai.OpenAI, server: Live) -> None:
    first = client.chat.completions.create(model="fake-omni", messages=HELLO, store=True)
    more = {"previous_response_id": first.id}
    client.chat.completions.create(model="fake-omni", messages=HELLO, extra_body=more)
    kept, following = server.service.requests
    assert (kept.keep, kept.previous) == (first.id, None)
    assert (following.keep, following.previous) == ("", first.id)

    async def unknown(request: Request) -> AsyncGenerator[Delta]:
        raise NotFound(f"previous is {request.previous!r}, which is not kept", field="previous")
        yield

    server.service.script = unknown
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="fake-omni", messages=HELLO, extra_body=more)
    assert caught.value.param == "previous_response_id"
    assert f"previous_response_id is '{first.id}'" in caught.value.message
    assert server.service.cancelled.get(timeout=120) == server.service.requests[-1].request_id


def test_every_parameter_reaches_its_stage(client: openai.OpenAI, server: Live) -> None:
    client.chat.completions.create(
        model="fake-omni", messages=HELLO, temperature=0.5, top_p=0.9, stop=["a", "b"], seed=7, logit_bias={"12": 3},
        max_completion_tokens=9, presence_penalty=0.1, frequency_penalty=-0.2, user="me", store=False, metadata={},
        extra_body={
            "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
            "stop_token_ids": [4], "priority": 5, "deadline": 60, "options": {"use_audio_in_video": True},
            "sampling": {"talker": {"temperature": 0, "max_tokens": 100}, "thinker": {"top_k": 8}},
        },
    )  # fmt: skip
    [request] = server.service.requests
    assert request.sampling == {
        "thinker": SamplingParams(
            temperature=0.5, top_p=0.9, stop=["a", "b"], logit_bias={12: 3.0}, max_tokens=9, presence_penalty=0.1,
            frequency_penalty=-0.2, top_k=8, min_p=0.1, repetition_penalty=1.1, min_tokens=2, ignore_eos=True,
            stop_token_ids=[4],
        ),
        "talker": SamplingParams(temperature=0, max_tokens=100),
    }  # fmt: skip
    assert (request.seed, request.priority, request.options) == (7, 5, {"use_audio_in_video": True})
    assert request.tenant == "me"
    assert request.deadline is not None


def test_extensions_come_back_when_asked_for(client: openai.OpenAI, server: Live) -> None:
    body = {"return_token_ids": True, "return_metrics": True}
    choice = client.chat.completions.create(model="fake-omni", messages=HELLO, extra_body=body).choices[0]
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == [5, 6, 7]
    assert choice.model_extra["segue"]["token_ids"] == {"thinker": [5, 6, 7], "talker": [1, 2]}
    metrics = choice.model_extra["segue"]["metrics"]
    assert (metrics["jct"], metrics["ttft"], metrics["ttfa"], metrics["rtf"]) == (2.0, 0.5, 1.0, 0.5)
    assert metrics["spans"] == [{"stage": "thinker", "what": "decode", "start": 0.1, "end": 0.9}]
    plain = client.chat.completions.create(model="fake-omni", messages=HELLO).choices[0]
    assert plain.model_extra == {"stop_reason": None, "token_ids": None}
    asked = client.chat.completions.create(
        model="fake-omni", messages=HELLO, extra_headers={"X-Return-Metrics": "true"}
    )
    assert "segue" in (asked.choices[0].model_extra or {})


def test_a_reply_can_be_sent_back_as_history(client: openai.OpenAI, server: Live) -> None:
    first = client.chat.completions.create(model="fake-omni", messages=HELLO, modalities=["text", "audio"])
    history = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "Again"}]
    client.chat.completions.create(model="fake-omni", messages=history)  # type: ignore[arg-type]
    assert [message.content for message in server.service.requests[1].messages] == [
        [TextPart("Say hello")], [TextPart("Hello, world")], [TextPart("Again")],
    ]  # fmt: skip


def test_a_prompt_may_be_token_ids(server: Live) -> None:
    body = {"model": "fake-omni", "prompt_token_ids": [1, 2, 3]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).status_code == 200
    [request] = server.service.requests
    assert (request.messages, request.prompt_token_ids) == ([], [1, 2, 3])
    media = {"multi_modal_data": {"video": "data:,a"}}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body | media, timeout=120).status_code == 200
    assert [(part.kind, part.data) for part in server.service.requests[1].media()] == [("video", b"a")]
    body = {"model": "fake-omni", "messages": [{"role": "user", "content": "see"}], **media}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "multi_modal_data")
    assert "without prompt_token_ids" in answer.json()["error"]["message"]


def test_a_large_body_is_taken(server: Live) -> None:
    data = base64.b64encode(bytes(3_000_000)).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
    body = {"model": "fake-omni", "messages": [{"role": "user", "content": content}]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).status_code == 200
    part = server.service.requests[0].messages[0].content[0]
    assert isinstance(part, MediaPart)
    assert part.data == bytes(3_000_000)


# ---- n


def test_n_choices_have_their_own_requests_and_seeds(client: openai.OpenAI, server: Live) -> None:
    async def by_seed(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", f"seed {request.seed}")
        yield finished()

    server.service.script = by_seed
    reply = client.chat.completions.create(model="fake-omni", messages=HELLO, n=3, seed=2**64 - 2)
    assert [(c.index, c.message.content) for c in reply.choices] == [
        (0, f"seed {2**64 - 2}"), (1, f"seed {2**64 - 1}"), (2, "seed 0"),
    ]  # fmt: skip
    assert len({request.request_id for request in server.service.requests}) == 3
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (10, 15)


def test_n_choices_stream_interleaved(client: openai.OpenAI, server: Live) -> None:
    gates = [Gate(), Gate()]

    async def in_turns(request: Request) -> AsyncGenerator[Delta]:
        index = int(request.request_id.rpartition("-")[2])
        yield TextDelta("thinker", f"{index}a")
        await gates[index].wait()
        yield TextDelta("thinker", f"{index}b")
        yield finished()

    server.service.script = in_turns
    stream = client.chat.completions.create(model="fake-omni", messages=HELLO, n=2, stream=True)
    seen: list[tuple[int, str]] = []
    ends: list[int] = []
    for chunk in stream:
        [choice] = chunk.choices
        if choice.delta.content:
            seen.append((choice.index, choice.delta.content))
            if len(seen) == 2:
                gates[1].open()
        if choice.finish_reason:
            ends.append(choice.index)
            gates[0].open()
    assert sorted(seen[:2]) == [(0, "0a"), (1, "1a")]
    assert seen[2:] == [(1, "1b"), (0, "0b")]
    assert ends == [1, 0]


def test_one_failing_choice_fails_the_request_and_cancels_the_others(client: openai.OpenAI, server: Live) -> None:
    async def first_fails(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "x")
        if request.request_id.endswith("-0"):
            raise StageFailed("no luck", stage="thinker")
        await asyncio.Event().wait()

    server.service.script = first_fails
    with pytest.raises(openai.InternalServerError, match="no luck"):
        client.chat.completions.create(model="fake-omni", messages=HELLO, n=2)
    gone = {server.service.cancelled.get(timeout=120) for _ in range(2)}
    assert gone == {request.request_id for request in server.service.requests}


# ---- streams


def test_a_stream_interleaves_text_and_audio(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake-omni", messages=HELLO, modalities=["text", "audio"], audio={"voice": "Anna", "format": "pcm16"},
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    kinds, text, transcript, heard, ids = [], "", "", b"", set()
    for chunk in chunks[1:-1]:
        delta = chunk.choices[0].delta
        if delta.content:
            kinds.append("text")
            text += delta.content
        if delta.audio is not None:
            ids.add(delta.audio.id)
            transcript += delta.audio.transcript or ""
            if delta.audio.data:
                kinds.append("audio")
                heard += base64.b64decode(delta.audio.data)
    assert kinds == ["text", "audio"] * 3
    assert text == transcript == "Hello, world"
    assert heard == pcm16(np.concatenate([samples(i) for i in range(3)]))
    assert len(ids) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 15
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "opus"])
def test_a_stream_in_another_format_is_one_file(client: openai.OpenAI, name: str) -> None:
    import av

    stream = client.chat.completions.create(
        model="fake-omni", messages=HELLO, modalities=["text", "audio"], audio={"voice": "Anna", "format": name},  # type: ignore[call-overload]
        stream=True,
    )  # fmt: skip
    data = b"".join(
        base64.b64decode(chunk.choices[0].delta.audio.data)
        for chunk in stream
        if chunk.choices[0].delta.audio and chunk.choices[0].delta.audio.data
    )
    if name == "wav":
        assert struct.unpack_from("<I", data, 40) == (0xFFFFFFFF,)
    with av.open(io.BytesIO(data)) as container:
        heard = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
    assert heard == pytest.approx(0.3, abs=0.11)


def test_the_first_text_is_seen_before_the_rest_is_made(client: openai.OpenAI, server: Live) -> None:
    gate = Gate()

    async def halting(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "first")
        await gate.wait()
        yield audio()
        yield finished()

    server.service.script = halting
    stream = client.chat.completions.create(
        model="fake-omni", messages=HELLO, stream=True, modalities=["text", "audio"]
    )
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.content == "first"
    gate.open()
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"


def test_a_stream_ends_with_done_and_carries_extensions_at_its_end(server: Live) -> None:
    body = {"model": "fake-omni", "messages": HELLO, "stream": True, "return_token_ids": True, "return_metrics": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"segue":{"token_ids":{"thinker":[5,6,7]' in lines[-2]
    assert '"metrics":{"jct":2.0' in lines[-2]
    assert "usage" not in lines[-2]


def test_many_clients_at_once_each_get_their_own(server: Live) -> None:
    async def echo(request: Request) -> AsyncGenerator[Delta]:
        part = request.messages[0].content[0]
        assert isinstance(part, TextPart)
        for letter in part.text:
            await asyncio.sleep(0)
            yield TextDelta("thinker", letter)
        yield finished()

    server.service.script = echo

    def ask(index: int) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as own:
            messages = [{"role": "user", "content": f"client {index}"}]
            if index % 2:
                chunks = own.chat.completions.create(model="fake-omni", messages=messages, stream=True)  # type: ignore[arg-type]
                return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reply = own.chat.completions.create(model="fake-omni", messages=messages)  # type: ignore[arg-type]
            return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(16))) == [f"client {index}" for index in range(16)]


# ---- failures on the way


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("the prompt is too long", field="messages"), 400, "invalid_value"),
        (Overloaded("the queue is full"), 429, "overloaded"),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
        (StageFailed("it broke", stage="talker"), 500, "stage_failed"),
        (StageLost("it died", stage="talker"), 503, "stage_lost"),
    ],
)
def test_an_error_before_the_first_delta_has_its_own_status(
    server: Live, error: Exception, status: int, code: str, stream: bool
) -> None:
    async def fails(request: Request) -> AsyncGenerator[Delta]:
        raise error
        yield finished()

    server.service.script = fails
    body = {"model": "fake-omni", "messages": HELLO, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()["error"]
    assert (body["code"], body["message"]) == (code, str(error))
    assert body.get("stage") == ("talker" if status in (500, 503) else None)


def test_an_error_in_mid_stream_is_the_last_event(client: openai.OpenAI, server: Live) -> None:
    async def breaks(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "half")
        raise StageLost("the talker died", stage="talker")

    server.service.script = breaks
    seen = []
    with pytest.raises(openai.APIError, match="the talker died") as caught:
        seen.extend(client.chat.completions.create(model="fake-omni", messages=HELLO, stream=True))
    assert caught.value.code == "stage_lost"
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        json={"model": "fake-omni", "messages": HELLO, "stream": True},
        timeout=120,
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1].startswith('data: {"error":')


def test_a_generation_that_never_finishes_is_an_error(client: openai.OpenAI, server: Live) -> None:
    async def breaks_off(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "half")

    server.service.script = breaks_off
    with pytest.raises(openai.InternalServerError, match="without saying how"):
        client.chat.completions.create(model="fake-omni", messages=HELLO)
    with pytest.raises(openai.APIError, match="without saying how"):
        list(client.chat.completions.create(model="fake-omni", messages=HELLO, stream=True))


def test_a_mistake_of_ours_is_answered_and_the_server_goes_on(client: openai.OpenAI, server: Live) -> None:
    async def bug(request: Request) -> AsyncGenerator[Delta]:
        raise KeyError("a secret detail")
        yield finished()

    server.service.script = bug
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="fake-omni", messages=HELLO, extra_headers={"X-Request-Id": "id-7"})
    assert "secret" not in str(caught.value)
    assert "id-7" in str(caught.value)
    assert caught.value.response.headers["x-request-id"] == "id-7"
    server.service.script = speak
    assert client.chat.completions.create(model="fake-omni", messages=HELLO).choices


def test_a_mistake_in_mid_stream_breaks_the_connection_off_and_only_that(server: Live) -> None:
    async def bug(request: Request) -> AsyncGenerator[Delta]:
        yield TextDelta("thinker", "half")
        raise KeyError("a secret detail")

    server.service.script = bug
    body = {"model": "fake-omni", "messages": HELLO, "stream": True}
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    server.service.script = speak
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).text.endswith("data: [DONE]\n\n")


def test_images_are_streamed(server: Live) -> None:
    body = {"model": "fake-omni", "messages": HELLO, "stream": True, "modalities": ["text", "image"]}
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).text
    assert '"delta":{"images":[{"type":"image_url","image_url":{"url":"data:image/png;base64,' in text


def test_served_names_stand_for_the_model() -> None:
    with (
        live(FakeService(), ServerSettings(served_names=("a", "b"))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert client.chat.completions.create(model="b", messages=HELLO).model == "b"
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="fake-omni", messages=HELLO)
        assert caught.value.code == "model_not_found"
        assert [model.id for model in client.models.list()] == ["a", "b"]


def test_what_lm_eval_asks_and_how_it_reads_the_answer(server: Live) -> None:
    """As `local-chat-completions` does with `--apply_chat_template`: no key, and up to four stops."""
    body = {"messages": HELLO, "model": "fake-omni", "max_tokens": 16, "temperature": 0, "seed": 1234}
    for stop in ([], ["\n\n"], ["a", "b", "c", "d"]):
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json={**body, "stop": stop}, headers={"Authorization": "Bearer"}
        )
        texts = {choice["index"]: choice["message"]["content"] for choice in answer.json()["choices"]}
        assert texts == {0: "Hello, world"}
