"""The example of a graph of one's own models: each gives what the library gives for the same input, while text becomes
speech as it is written, and after kill -9 of each worker."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import torch
from server_process import models_of_graph, served
from truth_system import System, apart, library_answers, until

from segue.engines.autoregressive.sample.sampler import code_uniforms
from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.deltas import AudioDelta, Delta, ModelDelta, TextDelta
from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.request import MediaPart
from segue.models.shared.library import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer
from segue.models.speech.pocket_tts.reference import Reference
from segue.orchestrator.omni.outputs import RequestOutput

EXAMPLE = Path(__file__).parents[3] / "examples" / "assistant" / "assistant.py"
SEED = 7
REPLY = "It was late, and *nobody* had come. The old house stood on the hill! Who is it, and what do you want from me?"
SENTENCES = ["It was late, and nobody had come.", "The old house stood on the hill!",
             "Who is it, and what do you want from me?"]  # fmt: skip
"""The reply as it is said: the example's transform leaves out marks of formatting."""
WRITES = {"structured_outputs": {"choice": [REPLY]}, "temperature": 0.0}
WITHIN = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with models_of_graph(tmp_path_factory.mktemp("assistant"), "whisper", "qwen3", "pocket-tts") as directory:
        yield directory


@pytest.fixture(scope="module")
def system(checkpoints: Path) -> Iterator[System]:
    system = System(EXAMPLE)
    yield system
    system.close()


@pytest.fixture(scope="module")
def prompt(assets: Path) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": [{"type": "audio", "audio": str(assets / "speech.wav")}]}],
        "modalities": ["text", "audio", "hear.text"],
        "voice": "marius",
        "seed": SEED,
        "sampling": {"think.llm": WRITES, "speak.backbone": {"temperature": 0.3}},
    }


@pytest.fixture(scope="module")
def undisturbed(system: System, prompt: dict[str, Any]) -> RequestOutput:
    [output] = system.ask(prompt)
    return output


def questions_of(transcript: str) -> list[dict[str, Any]]:
    """What the example makes of a transcript."""
    spec = importlib.util.spec_from_file_location("assistant_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.as_question(transcript))


def test_it_hears_as_the_library(undisturbed: RequestOutput, checkpoints: Path, assets: Path) -> None:
    directory = checkpoints / "whisper"
    model = AutoModelForSpeechSeq2Seq.from_pretrained(directory, dtype=torch.float32).eval()
    samples = decode_audio(MediaPart("audio", (assets / "speech.wav").read_bytes()), 16000, MediaLimits())
    features = AutoFeatureExtractor.from_pretrained(directory)(samples, sampling_rate=16000, return_tensors="pt")
    ids = model.generate(features["input_features"], task="transcribe")
    text = AutoTokenizer.from_pretrained(directory).decode(ids[0], skip_special_tokens=True)
    assert undisturbed.models["hear"].text.strip() == text.strip() != ""


def test_it_thinks_as_the_library(system: System, checkpoints: Path, prompt: dict[str, Any]) -> None:
    asked = {**prompt, "modalities": ["text", "hear.text"], "sampling": {"think.llm": {"temperature": 0.0}}}
    [output] = system.ask(asked)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "qwen3")
    messages = questions_of(output.models["hear"].text)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    [answer] = library_answers(checkpoints / "qwen3", [ids], len(output.token_ids["think.llm"]))
    assert output.token_ids["think.llm"] == answer
    assert output.usage.prompt_tokens == len(ids)
    assert {stage.partition(".")[0] for stage, *_ in output.metrics.spans} == {"hear", "think"}, "nobody speaks"


def test_it_speaks_as_the_library(undisturbed: RequestOutput, checkpoints: Path) -> None:
    library = Reference(checkpoints / "pocket-tts")
    noise = torch.special.ndtri(torch.from_numpy(code_uniforms(SEED, 0, 300, 8))) * 0.3**0.5
    waves = [library.spoken(sentence, "marius", noise=noise)[1].numpy() for sentence in SENTENCES]
    assert undisturbed.text == REPLY
    assert undisturbed.audio is not None
    assert undisturbed.audio.samples.shape == np.concatenate(waves).shape
    assert apart(undisturbed.audio.samples, np.concatenate(waves)) < WITHIN


def test_the_first_sound_does_not_wait_for_the_reply(system: System, prompt: dict[str, Any]) -> None:
    """The writing worker is stopped after the first sentence, and goes on when that is heard."""
    worker = psutil.Process(system.pid("think.llm"))
    written = ""
    stopped_at: list[int] = []

    def seen(delta: Delta) -> None:
        nonlocal written
        if isinstance(delta, TextDelta):
            written += delta.text
            if not stopped_at and "come. T" in written:
                worker.suspend()
                stopped_at.append(len(written))
        elif isinstance(delta, AudioDelta) and worker.status() == psutil.STATUS_STOPPED:
            stopped_at.append(len(written))
            worker.resume()

    async def body() -> bool:
        nonlocal written
        written = ""
        stopped_at.clear()
        output = await system.collect(prompt, seen)
        assert output.text == REPLY
        return len(stopped_at) == 2 and stopped_at[1] < len(REPLY)

    assert system.in_time(body, bool)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("hear.llm", marks=pytest.mark.nightly),
        "think.llm",
        "speak.backbone",
        pytest.param("speak.vocoder", marks=pytest.mark.nightly),
    ],
)
def test_killed_at_work(system: System, prompt: dict[str, Any], undisturbed: RequestOutput, stage: str) -> None:
    kinds: dict[str, type] = {"hear": ModelDelta, "think": TextDelta, "speak": AudioDelta}

    async def body() -> RequestOutput:
        killed = False

        def kill(delta: Delta) -> None:
            nonlocal killed
            if isinstance(delta, kinds[stage.partition(".")[0]]) and not killed:
                killed = True
                system.kill(stage)

        return await system.collect(prompt, kill)

    output = system.in_time(body, lambda output: output.metrics.attempts > 1)
    assert output.metrics.attempts in (2, 3), "of two sentences at work, each loses its worker"
    check_same(output, undisturbed)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("hear.input", marks=pytest.mark.nightly),
        "think.input",
        pytest.param("speak.input", marks=pytest.mark.nightly),
    ],
)
def test_killed_before_it_read(system: System, prompt: dict[str, Any], undisturbed: RequestOutput, stage: str) -> None:
    """The worker is stopped while the request arrives, and killed with it in its hands."""

    def holder() -> int:
        """The process that has the request; 0 if none has."""
        orchestrator = system.omni.orchestrator
        for state in orchestrator.requests.values():
            if stage in state.stages and (replica := orchestrator.replicas.by_worker(state.stages[stage].worker)):
                return replica.pid or 0
        return 0

    async def body() -> None:
        await until(lambda: all(one.state == "ready" for one in system.omni.orchestrator.replicas.all))
        workers = [psutil.Process(one.pid) for one in system.omni.health().stages[stage].replicas]
        for worker in workers:
            worker.suspend()
        task = asyncio.create_task(system.collect(prompt))
        await until(lambda: bool(holder()))
        system.kill_worker(killed := holder())
        for worker in workers:
            if worker.pid != killed:
                worker.resume()
        check_same(await task, undisturbed)

    system.run(system.replaced())
    system.run(body())
    system.run(system.replaced())


def check_same(output: RequestOutput, other: RequestOutput) -> None:
    assert output.token_ids["think.llm"] == other.token_ids["think.llm"]
    assert output.models["hear"].text == other.models["hear"].text
    assert output.text == other.text
    assert output.audio is not None
    assert other.audio is not None
    assert output.audio.samples.shape == other.audio.samples.shape
    assert apart(output.audio.samples, other.audio.samples) < WITHIN


def test_a_client_that_leaves_leaves_nothing(system: System, prompt: dict[str, Any]) -> None:
    async def body() -> None:
        deltas = system.omni.stream(system.omni.request(prompt))
        async for delta in deltas:
            if isinstance(delta, TextDelta):
                break
        await deltas.aclose()  # type: ignore[attr-defined]
        assert not system.omni.orchestrator.requests

    system.run(body())


def test_what_is_wrong_with_a_request_is_named(system: System, prompt: dict[str, Any], assets: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"modalities has 'hear.txt'; this graph gives .*hear.text"):
        system.ask({**prompt, "modalities": ["hear.txt"]})
    picture = {"type": "image", "image": str(assets / "photo.jpg")}
    with pytest.raises(InvalidRequest, match=r"content\[0\] is image, which no model takes from clients: 'hear' takes"):
        system.ask({**prompt, "messages": [{"role": "user", "content": [picture]}]})
    with pytest.raises(InvalidRequest, match=r"sampling names stage 'think', .*did you mean 'think.llm'"):
        system.ask({**prompt, "sampling": {"think": {"temperature": 0.0}}})
    with pytest.raises(InvalidRequest, match="n is 2; it must be 1: the output of 'think' goes on to another model"):
        system.ask({**prompt, "sampling": {"think.llm": {"n": 2}}})
    with pytest.raises(NotFound, match="no voice 'nova'"):
        system.ask({**prompt, "voice": "nova"})


@pytest.mark.nightly  # test_server_pocket_tts
def test_over_http(checkpoints: Path, assets: Path, undisturbed: RequestOutput) -> None:
    recording = base64.b64encode((assets / "speech.wav").read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": recording, "format": "wav"}}
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [part]}],
        "modalities": ["text", "audio", "hear.text"],
        "audio": {"voice": "marius", "format": "pcm16"},
        "seed": SEED,
        "extra_body": {"sampling": {"think.llm": WRITES, "speak.backbone": {"temperature": 0.3}}},
    }
    with served(EXAMPLE) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        [choice] = client.chat.completions.create(**asked).choices
        message = json.loads(choice.message.model_dump_json())
        assert message["content"] == REPLY
        assert message["models"] == {"hear": {"text": undisturbed.models["hear"].text}}
        heard, sound = "", b""
        for chunk in client.chat.completions.create(**asked, stream=True):
            delta = json.loads(chunk.choices[0].delta.model_dump_json())
            heard += (delta.get("models") or {}).get("hear", {}).get("text", "")
            sound += base64.b64decode((delta.get("audio") or {}).get("data") or "")
        assert heard == undisturbed.models["hear"].text
        whole = base64.b64decode(message["audio"]["data"])
        assert undisturbed.audio is not None
        assert len(sound) == len(whole) == 2 * len(undisturbed.audio.samples)
        one, other = (np.frombuffer(data, dtype="<i2").astype(int) for data in (sound, whole))
        assert np.abs(one - other).max() <= 3, "sums are rounded in another order in another batch"
