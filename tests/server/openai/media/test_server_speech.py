"""`/v1/audio/speech`: every format holds the model's samples, pieces leave as they are made, mistakes are named."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from fake_service import RATE, FakeService, Gate, Live, finished, live, sent

from segue.messages.deltas import AudioDelta, Delta
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.request import MediaPart, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.messages.speech import TextToSpeech
from segue.server.settings import ServerSettings

PATH = "/v1/audio/speech"
LOSSY = {"mp3": "audio/mpeg", "opus": "audio/ogg", "aac": "audio/aac"}
TYPES = {**LOSSY, "flac": "audio/flac", "wav": "audio/wav", "pcm": "audio/pcm"}
SAYS = TextToSpeech(
    instructions=True,
    languages=["German", "English"],
    options={"say": True},
    sampling={"talker": SamplingParams(max_tokens=900)},
)
VOICE = np.random.default_rng(0).normal(size=6).astype(np.float32)


def voice(seconds: float, rate: int = RATE) -> np.ndarray:
    """A changing mixture of tones, in which a shift by a few samples is seen."""
    t = np.arange(int(seconds * rate)) / rate
    tones = sum(weight * np.sin(2 * np.pi * (170 * (i + 1) * t + i * t**2 * 20)) for i, weight in enumerate(VOICE))
    return (0.05 * tones).astype(np.float32)


def spoken(samples: np.ndarray, rate: int = RATE, piece: float = 0.25) -> list[Delta]:
    size = int(rate * piece)
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [*(AudioDelta("vocoder", part.tobytes(), rate) for part in parts), finished()]


async def speak(request: Request) -> AsyncGenerator[Delta]:
    for delta in spoken(voice(2.0)):
        yield delta


def service(says: TextToSpeech | None = SAYS, script: Any = speak) -> FakeService:
    made = FakeService(script)
    made.card.says = says
    return made


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    with live(service()) as server:
        yield server


@pytest.fixture(autouse=True)
def scripted(server: Live) -> None:
    server.service.script = speak


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "fake-omni", "input": "Hello there.", "voice": "Ben", **changes}


def decoded(data: bytes) -> tuple[np.ndarray, int]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [*container.decode(stream), None]
        heard = [out.to_ndarray()[0] for frame in frames for out in resampler.resample(frame)]
        return np.concatenate(heard), stream.rate


def words(samples: np.ndarray) -> np.ndarray:
    return np.rint(samples * 32767).astype("<i2")


@pytest.mark.parametrize("form", sorted(TYPES))
def test_every_format_holds_the_samples(client: openai.OpenAI, form: Any) -> None:
    answer = client.audio.speech.create(model="fake-omni", input="Hello.", voice="Ben", response_format=form)
    assert answer.response.headers["content-type"] == TYPES[form]
    assert "content-length" not in answer.response.headers
    expected = voice(2.0)
    if form == "pcm":
        assert answer.content == words(expected).tobytes()
        return
    heard, rate = decoded(answer.content)
    if form not in LOSSY:
        assert rate == RATE
        np.testing.assert_array_equal(np.rint(heard * 32768).astype("<i2"), words(expected))
        return
    assert len(heard) / rate == pytest.approx(2.0, abs=0.12)
    told = np.interp(np.arange(len(expected)) / RATE, np.arange(len(heard)) / rate, heard)
    spectra = np.fft.rfft(told), np.fft.rfft(expected)
    likeness = np.fft.irfft(spectra[0] * spectra[1].conj()).max()  # whatever the codec's delay is
    assert likeness / (np.linalg.norm(told) * np.linalg.norm(expected)) > 0.9


def test_the_default_is_mp3_and_the_first_voice(client: openai.OpenAI, server: Live) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="fake-omni", input="Hello.", voice=openai.omit, extra_body={"seed": 3}
    ) as answer:
        assert answer.headers["content-type"] == "audio/mpeg"
        assert len(b"".join(answer.iter_bytes())) > 10_000
    [request] = server.service.requests
    assert (request.voice, request.seed, request.modalities) == (None, 3, ["audio"])


def test_what_the_model_gets(http: httpx.Client, server: Live) -> None:
    sampling = {"talker": {"temperature": 0}, "thinker": {"top_k": 3}}
    own = {"instructions": "Whisper.", "language": "german", "options": {"use_audio_in_video": True}, "stream": True}
    answer = http.post(PATH, json=body(voice={"id": "Anna"}, sampling=sampling, priority=2, user="me", **own))
    assert answer.status_code == 200
    [request] = server.service.requests
    [message] = request.messages
    assert (message.role, message.content) == ("user", [TextPart("Hello there.")])
    assert (request.voice, request.modalities, request.priority) == ("Anna", ["audio"], 2)
    expected = {"instructions": "Whisper.", "language": "German", "use_audio_in_video": True, "say": True}
    assert request.options == expected
    assert request.sampling == {
        "talker": SamplingParams(temperature=0.0, max_tokens=900),
        "thinker": SamplingParams(top_k=3),
    }


@pytest.mark.parametrize("form", sorted(TYPES))
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_pieces_leave_before_the_model_is_done(http: httpx.Client, server: Live, form: str, stream_format: str) -> None:
    """The model says no more until the client has half of what it has said."""
    gate, first = Gate(), spoken(voice(2.0))

    async def script(request: Request) -> AsyncGenerator[Delta]:
        for delta in first[:-1]:
            yield delta
        await gate.wait()
        for delta in first:
            yield delta

    server.service.script = script
    asked = body(response_format=form, stream_format=stream_format, speed=1.25)
    whole, enough = 0, 0.5 * (2 * 24000 * 2 if form in ("wav", "pcm") else 12_000)
    opened = False
    with http.stream("POST", PATH, json=asked) as answer:
        for piece in answer.iter_raw():
            whole += len(piece)
            if whole > enough and not opened:
                opened = True
                gate.open()
    assert opened
    assert whole > 1.5 * enough


def test_events_hold_the_same_bytes(http: httpx.Client) -> None:
    answer = http.post(PATH, json=body(stream_format="sse", response_format="flac"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data")]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert len(deltas) > 4
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    assert done == {"type": "speech.audio.done", "usage": usage}
    data = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert data == http.post(PATH, json=body(response_format="flac")).content


@pytest.mark.parametrize("speed", [0.25, 0.8, 1.7, 4.0])
def test_speed_changes_the_length_and_not_the_pitch(http: httpx.Client, server: Live, speed: float) -> None:
    tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(3 * RATE) / RATE)).astype(np.float32)

    async def script(request: Request) -> AsyncGenerator[Delta]:
        for delta in spoken(tone):
            yield delta

    server.service.script = script
    heard, rate = decoded(http.post(PATH, json=body(response_format="wav", speed=speed)).content)
    assert len(heard) / rate == pytest.approx(3.0 / speed, rel=0.04)
    strongest = np.abs(np.fft.rfft(heard * np.hanning(len(heard)))).argmax() * rate / len(heard)
    assert strongest == pytest.approx(440, abs=3)


@pytest.mark.parametrize("rate", [16000, 44100])
def test_pcm_is_at_openais_rate_whatever_the_models_is(http: httpx.Client, server: Live, rate: int) -> None:
    async def script(request: Request) -> AsyncGenerator[Delta]:
        for delta in spoken(voice(1.0, rate), rate):
            yield delta

    server.service.script = script
    heard = np.frombuffer(http.post(PATH, json=body(response_format="pcm")).content, "<i2") / 32767
    assert len(heard) == pytest.approx(24000, abs=2)
    middle = slice(2400, 21600)
    assert np.corrcoef(heard[middle], voice(1.0)[: len(heard)][middle])[0, 1] > 0.999
    assert decoded(http.post(PATH, json=body(response_format="wav")).content)[1] == rate


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"input": None}, "input", "input is"),
        ({"input": " \n"}, "input", "at least one word"),
        ({"input": "a" * 4097}, "input", "4097 characters; at most 4096"),
        ({"voice": "alloy"}, "voice", "speaks with: Anna, Ben"),
        ({"voice": {"id": "alloy"}}, "voice.id", "speaks with: Anna, Ben"),
        ({"voice": {"name": "Anna"}}, "voice", "name"),
        ({"response_format": "ogg"}, "response_format", "one of mp3, opus, aac, flac, wav, pcm"),
        ({"stream_format": "audi"}, "stream_format", "did you mean 'audio'"),
        ({"speed": 0.2}, "speed", "from 0.25 to 4"),
        ({"speed": 5}, "speed", "from 0.25 to 4"),
        ({"speed": "fast"}, "speed", "speed"),
        ({"language": "Dutch"}, "language", "one of German, English"),
        ({"options": {"language": "German"}}, "options.language", "at the top"),
        ({"options": {"say": False}}, "options.say", "unknown parameter"),
        ({"sampling": {"vocoder": {}}}, "sampling", "no stage that samples"),
        ({"sampling": {"talker": {"temperature": 3}}}, "sampling.talker.temperature", "from 0 to 2"),
        ({"ref_text": "Hm."}, "ref_text", "without the recording"),
        ({"ref_audio": "data:audio/wav;base64,AAAA"}, "ref_audio", "this model clones no voices"),
        ({"inptu": "Hello"}, "inptu", "did you mean 'input'"),
        ({"model": "tts-1"}, "model", "not served here"),
    ],
)
def test_mistakes_are_named(http: httpx.Client, changes: dict[str, Any], field: str, said: str) -> None:
    answer = http.post(PATH, json=body(**changes))
    error = answer.json()["error"]
    assert answer.status_code == (404 if field == "model" else 400), error
    assert error["param"] == field
    assert said in error["message"]


def test_what_a_stage_refuses_has_the_clients_name(http: httpx.Client, server: Live) -> None:
    async def script(request: Request) -> AsyncGenerator[Delta]:
        raise InvalidRequest("messages[0].content[0]: the text holds '<|AUDIO|>'", field="messages[0].content[0]")
        yield finished()

    server.service.script = script
    answer = http.post(PATH, json=body())
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["message"][:14]) == ("input", "input: the tex")


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_a_failure_in_the_middle_is_no_complete_answer(http: httpx.Client, server: Live, stream_format: str) -> None:
    async def script(request: Request) -> AsyncGenerator[Delta]:
        yield spoken(voice(1.0))[0]
        raise StageFailed("the vocoder died", stage="vocoder")

    server.service.script = script
    asked = body(response_format="pcm", stream_format=stream_format)
    if stream_format == "audio":
        with pytest.raises(httpx.RemoteProtocolError):
            http.post(PATH, json=asked)
        return
    answer = http.post(PATH, json=asked)
    assert answer.text.rstrip().splitlines()[-2] == "event: error"
    assert "the vocoder died" in answer.text


def test_a_failure_at_first_has_its_status(http: httpx.Client, server: Live) -> None:
    async def script(request: Request) -> AsyncGenerator[Delta]:
        yield finished()

    server.service.script = script
    answer = http.post(PATH, json=body())
    assert answer.status_code == 500
    assert "no audio" in answer.json()["error"]["message"]


def test_a_client_that_leaves_is_cancelled() -> None:
    gate = Gate()

    async def script(request: Request) -> AsyncGenerator[Delta]:
        yield spoken(voice(1.0))[0]
        await gate.wait()
        yield finished()

    made = service(script=script)
    with live(made) as server:
        sock = sent(server.port, PATH, body(response_format="pcm"))
        assert sock.recv(10)
        sock.close()
        assert made.cancelled.get(timeout=120) == made.requests[0].request_id


def test_a_model_that_cannot_is_refused_by_name() -> None:
    with live(service(says=None)) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post(PATH, json=body())
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(
        "model 'fake-omni' cannot say a given text: it takes audio, image, text, video and gives "
    )
    assert "/v1/chat/completions" in message


def test_instructions_and_languages_only_where_the_model_has_them() -> None:
    with live(service(says=TextToSpeech())) as server, httpx.Client(base_url=server.url) as http:
        for name, value in (("instructions", "Sing."), ("language", "German")):
            answer = http.post(PATH, json=body(**{name: value}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert http.post(PATH, json=body(instructions="", language="")).status_code == 200


def test_a_voice_is_cloned_only_where_the_operator_allows_it() -> None:
    url = "data:audio/wav;base64," + base64.b64encode(b"RIFF").decode()
    asked = {"model": "fake-omni", "input": "Hello.", "ref_audio": url, "ref_text": "Hm."}
    made = service(says=TextToSpeech(cloning=True))
    with live(made) as server, httpx.Client(base_url=server.url) as http:
        refused = http.post(PATH, json=asked)
    assert refused.status_code == 400
    assert "--allow-voice-cloning" in refused.json()["error"]["message"]
    settings = ServerSettings(drain_seconds=1, allow_voice_cloning=True)
    with live(made, settings) as server, httpx.Client(base_url=server.url) as http:
        assert http.post(PATH, json={**asked, "voice": "Ben"}).json()["error"]["param"] == "voice"
        assert http.post(PATH, json=asked).status_code == 200
    [request] = made.requests
    recording, text = request.messages[0].content
    assert recording == MediaPart("audio", b"RIFF", role="voice", field="ref_audio")
    assert text == TextPart("Hello.")
    assert request.options == {"ref_text": "Hm."}
