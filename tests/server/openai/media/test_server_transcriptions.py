"""POST /v1/audio/transcriptions and /v1/audio/translations as the official client uses them, and as a careless one
does."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_service import FakeService, Live, live

from segue.messages.deltas import (
    Delta,
    Finished,
    RequestMetrics,
    TextDelta,
    TokenLogprobs,
    TokensDelta,
    TopToken,
    Usage,
)
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.messages.speech import SpeechFacts
from segue.models.shared.dialects.dialect import Dialect
from segue.models.shared.dialects.reasoning import THINK
from segue.orchestrator.transcription import check_transcription, transcribed

URL = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
FACTS = SpeechFacts({"en": 50, "de": 51}, ["transcribe", "translate"], first_time=100, window=3000, stride=2)
OLD = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
"""The client has the endpoint, and warns of it."""
WORDS = {1: " Good", 2: " morning", 3: " to you"}
FILE = ("clip.wav", b"RIFF of some kind", "audio/wav")


async def play(request: Request) -> AsyncGenerator[Delta]:
    """One generation: a recording of two seconds in German."""
    if request.modalities == ["tokens"]:
        yield TokensDelta("input", [6], ["<s>"], "<s>", 200, 1.995)
        ids: list[int] = []
    elif request.options.get("detect"):
        ids = [51]
    elif request.options["timestamps"]:
        ids = [100, 1, 2, 150, 150, 3, 180, 9]
    else:
        ids = [1, 2, 3, 9]
    for token in ids if not request.options.get("detect") else []:
        text = f"<|{(token - 100) * 0.02:.2f}|>" if token >= 100 else WORDS.get(token, "")
        told = [TokenLogprobs(TopToken(token, -0.5, 1, text, text.encode()))]
        yield TextDelta("llm", text, [token], logprobs=told if request.sampling["llm"].logprobs is not None else [])
    yield Finished("stop", {"llm": ids}, Usage(4, 0, {"text": 4}, {"text": len(ids)}), RequestMetrics())


async def listen(request: Request) -> AsyncGenerator[Delta]:
    check_transcription(request, FACTS, "llm")
    [message] = request.messages
    [part] = message.content
    assert isinstance(part, MediaPart)
    if part.data.startswith(b"broken"):
        raise InvalidRequest("file: this is no audio file that can be read", field="file")
    async for delta in transcribed(play, request, FACTS, "llm"):
        yield delta


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    service = FakeService(listen)
    service.card.gives, service.card.takes = frozenset({"text"}), frozenset({"text", "audio"})
    service.card.text_stage, service.card.sampling_stages = "llm", ["llm"]
    service.card.options, service.card.speech = frozenset({"language", "task", "timestamps", "prompt"}), FACTS
    with live(service) as server:
        yield server


@pytest.fixture
def server(running: Live) -> Live:
    running.service.script = listen
    running.service.card.speech = FACTS
    running.service.requests.clear()
    return running


def test_json(client: openai.OpenAI, server: Live) -> None:
    answer = client.audio.transcriptions.create(model="fake-omni", file=FILE)
    assert answer.text == "Good morning to you"
    assert answer.usage is not None
    assert answer.usage.to_dict() == {"type": "duration", "seconds": 2}
    [request] = server.service.requests
    assert request.options == {"task": "transcribe", "timestamps": False}
    assert request.messages[0].content == [MediaPart("audio", FILE[1], field="file")]


def test_the_model_may_be_left_out(server: Live) -> None:
    """As with every other body: there is but one."""
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": FILE}, timeout=60)
    assert (answer.status_code, answer.json()["text"]) == (200, "Good morning to you")


def test_what_is_said_of_the_recording(client: openai.OpenAI, server: Live) -> None:
    client.audio.transcriptions.create(
        model="fake-omni", file=FILE, language="de", prompt="Of ships", temperature=0.4, extra_body={"seed": 7}
    )
    [request] = server.service.requests
    assert request.options == {"task": "transcribe", "timestamps": False, "language": "de", "prompt": "Of ships"}
    assert request.sampling["llm"].temperature == 0.4
    assert request.seed == 7


def test_verbose_json(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.create(
        model="fake-omni", file=FILE, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (answer.language, float(answer.duration), answer.text) == ("de", 1.995, "Good morning to you")
    assert answer.segments is not None
    first, second = answer.segments
    assert (first.id, first.start, first.end, first.text, first.tokens) == (
        0,
        0.0,
        1.0,
        " Good morning",
        [100, 1, 2, 150],
    )
    assert (second.id, second.start, second.end, second.seek) == (1, 1.0, 1.6, 0)
    assert first.avg_logprob == -0.5
    assert first.compression_ratio > 0


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("text", "Good morning to you\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:01,000\nGood morning\n\n2\n00:00:01,000 --> 00:00:01,600\nto you\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nGood morning\n\n00:00:01.000 --> 00:00:01.600\nto you\n\n"),
    ],
)
def test_forms_of_text(client: openai.OpenAI, http: httpx.Client, form: Any, text: str) -> None:
    assert client.audio.transcriptions.create(model="fake-omni", file=FILE, response_format=form) == text
    answer = http.post(URL, data={"model": "fake-omni", "response_format": form}, files={"file": FILE})
    assert answer.headers["content-type"].startswith("text/plain")


def test_streamed(client: openai.OpenAI) -> None:
    events = list(client.audio.transcriptions.create(model="fake-omni", file=FILE, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == "Good morning to you"
    last = events[-1]
    assert last.type == "transcript.text.done"
    assert last.text == "Good morning to you"
    assert last.to_dict()["usage"] == {"type": "duration", "seconds": 2}


@OLD
def test_translations(client: openai.OpenAI, server: Live) -> None:
    answer = client.audio.translations.create(model="fake-omni", file=FILE, response_format="verbose_json")
    assert answer.text == "Good morning to you"
    assert answer.to_dict()["task"] == "translate"
    assert answer.language == "en"
    [request] = server.service.requests
    assert request.options["task"] == "translate"


def error(answer: httpx.Response) -> tuple[int, str | None, str]:
    body = json.loads(answer.content)["error"]
    return answer.status_code, body["param"], body["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (URL, {"response_format": "xml"}, "response_format", "one of json"),
        (URL, {"response_format": "srt", "stream": "true"}, "stream", "use json or text"),
        (
            URL,
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            "timestamp_granularities",
            "word",
        ),
        (URL, {"timestamp_granularities[]": "segment"}, "timestamp_granularities", "needs verbose_json"),
        (URL, {"timestamp_granularities[]": "page"}, "timestamp_granularities", "must be 'segment'"),
        (URL, {"temperature": "3"}, "temperature", "from 0 to 2"),
        (URL, {"temperature": "warm"}, "temperature", "warm"),
        (URL, {"language": "xx"}, "language", "does not know"),
        (URL, {"include[]": "logprobs"}, "include", "does not support"),
        (URL, {"langauge": "de"}, "langauge", "did you mean 'language'"),
        (TRANSLATIONS, {"timestamp_granularities[]": "segment"}, "timestamp_granularities", "unknown parameter"),
        (URL, {"model": "whisper-1"}, "model", "not served here"),
    ],
)
def test_what_is_refused(http: httpx.Client, path: str, fields: dict[str, Any], param: str, said: str) -> None:
    values = {"model": "fake-omni", **fields}
    parts = [(name, (None, value)) for name, value in values.items()]
    status, named, message = error(http.post(path, files=[*parts, ("file", FILE)]))
    assert status == (404 if param == "model" else 400)
    assert named == param
    assert said in message


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (("clip.wav", b""), "file is empty"),
        (("clip.wav", b"broken"), "no audio file"),
        ((None, "clip.wav"), "it must be one file"),
        (None, "file is missing"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_files_that_are_wrong(http: httpx.Client, file: Any, said: str, stream: bool) -> None:
    fields: list[Any] = [("model", (None, "fake-omni")), ("stream", (None, json.dumps(stream)))]
    status, named, message = error(http.post(URL, files=[*fields, *([("file", file)] if file else [])]))
    assert (status, named) == (400, "file")
    assert said in message


def test_json_bodies_are_refused(http: httpx.Client) -> None:
    status, named, message = error(http.post(URL, json={"model": "fake-omni", "file": "clip.wav"}))
    assert (status, named) == (400, "file")
    assert "multipart/form-data" in message


@OLD
def test_models_of_one_language_do_not_translate(client: openai.OpenAI, server: Live) -> None:
    server.service.card.speech = SpeechFacts({}, ["transcribe"], 100, 3000, 2)
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        client.audio.translations.create(model="fake-omni", file=FILE)


class AtTheDoor(FakeService):
    """What `AsyncOmni` refuses, it refuses before the stream has begun."""

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        check_transcription(request, FACTS, "llm")
        return super().stream(request)


def test_what_is_refused_at_the_door_is_named_as_it_was_written(server: Live) -> None:
    service = AtTheDoor(play)
    service.card = server.service.card
    with live(service) as other, httpx.Client(base_url=other.url, timeout=120) as http:
        error = http.post(URL, files={"file": FILE}, data={"model": service.card.name, "language": "german"}).json()
    assert error["error"]["param"] == "language"
    assert all(fact in error["error"]["message"] for fact in ("'german'", "en, de"))


# --- models that chat: asked in words


CHAT_USAGE = Usage(40, 0, {"audio": 30, "text": 10}, {"text": 3})


async def chats(request: Request) -> AsyncGenerator[Delta]:
    """A model that thinks first."""
    for text in ("<th", "ink>Hm.</thi", "nk>\n\nGood", " morning", " to you"):
        yield TextDelta("llm", text, [1])
    yield Finished("stop", {"llm": [1]}, CHAT_USAGE, RequestMetrics())


@pytest.fixture
def chatting(server: Live) -> Iterator[Live]:
    card = server.service.card
    card.speech, before = None, card.dialect
    server.service.script, card.dialect = chats, Dialect(reasoning=THINK)
    yield server
    card.dialect = before


@OLD
def test_a_model_that_chats_is_asked_for_the_words(client: openai.OpenAI, chatting: Live) -> None:
    answer = client.audio.transcriptions.create(
        model="fake-omni", file=FILE, language="de", prompt="Of ships", temperature=0.4, extra_body={"seed": 7}
    )
    assert answer.text == "Good morning to you"
    assert answer.usage is not None
    details = {"audio_tokens": 30, "text_tokens": 10}
    counts = {"input_tokens": 40, "output_tokens": 3, "total_tokens": 43, "input_token_details": details}
    assert answer.usage.to_dict() == {"type": "tokens", **counts}
    translated = client.audio.translations.create(model="fake-omni", file=FILE, response_format="text")
    assert translated == "Good morning to you\n"
    heard, english = chatting.service.requests
    recording, asked = heard.messages[0].content
    assert recording == MediaPart("audio", FILE[1], field="file")
    assert isinstance(asked, TextPart)
    assert asked.text.startswith("Transcribe the speech in this recording, which is in the language 'de'.")
    assert asked.text.endswith("\nContext: Of ships")
    assert (heard.modalities, heard.options, heard.seed) == (["text"], {}, 7)
    assert heard.sampling == {"llm": SamplingParams(temperature=0.4, max_tokens=1000)}
    [_, asked] = english.messages[0].content
    assert isinstance(asked, TextPart)
    assert asked.text == "Translate the speech in this recording into English. Write only the translation."
    assert english.sampling["llm"].temperature == 0.0


def test_its_thoughts_are_not_streamed(client: openai.OpenAI, chatting: Live) -> None:
    events = list(client.audio.transcriptions.create(model="fake-omni", file=FILE, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert [event.delta for event in events[:3]] == ["Good", " morning", " to you"]
    assert events[-1].text == "Good morning to you"


@pytest.mark.parametrize("form", ["verbose_json", "srt", "vtt"])
def test_it_gives_no_times(chatting: Live, form: str) -> None:
    answer = httpx.post(chatting.url + URL, files={"file": FILE}, data={"response_format": form}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "gives no timestamps; use json or text" in answer.json()["error"]["message"]


def test_a_model_that_hears_nothing_transcribes_nothing(chatting: Live) -> None:
    card = chatting.service.card
    before, card.takes = card.takes, frozenset({"text"})
    try:
        answer = httpx.post(chatting.url + URL, files={"file": FILE}, timeout=60)
    finally:
        card.takes = before
    assert answer.status_code == 400
    assert "does not transcribe" in answer.json()["error"]["message"]
