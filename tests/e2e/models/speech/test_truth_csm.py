"""CSM through the whole system: its speech is the library's, streamed, and after kill -9 of each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server_process import segue
from truth_system import System, apart

from segue.messages.deltas import AudioDelta, Delta
from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.reference import Question
from segue.messages.sampling import SamplingParams
from segue.models.shared.reference import Library
from segue.models.speech.csm.reference import Reference, load
from segue.models.speech.csm.tiny import presets as tiny
from segue.orchestrator.omni.outputs import RequestOutput

ROWS = 110
WITHIN = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("csm")
    tiny.make(directory)
    return directory


@pytest.fixture(scope="module")
def system(checkpoint: Path) -> Iterator[System]:
    system = System(checkpoint)
    yield system
    system.close()


@pytest.fixture(scope="module")
def library(checkpoint: Path) -> Reference:
    return load(Library(checkpoint, "cpu", torch.float32))


def asked(text: str, voice: str = "0", *before: Any) -> dict[str, Any]:
    return {
        "messages": [*before, {"role": "user", "content": text}],
        "modalities": ["audio"],
        "voice": voice,
        "sampling": {"backbone": SamplingParams(temperature=0.0, max_tokens=ROWS)},
    }


@pytest.fixture(scope="module")
def prompts(assets: Path) -> list[dict[str, Any]]:
    heard = [{"type": "text", "text": "Front, centre."}, {"type": "audio", "audio": str(assets / "speech.wav")}]
    return [
        asked("Good morning!", "1"),
        asked("Hello there", "1"),
        asked("and who are you?", "0", {"role": "user", "name": "4", "content": heard}),
    ]


def check(system: System, library: Reference, prompt: dict[str, Any], output: RequestOutput) -> None:
    """The library is forced to follow the first codes."""
    answer = library.answer(Question(0, system.omni.request(prompt), output.token_ids))
    [followed] = answer.followed
    assert followed.best == output.token_ids["backbone"]
    assert output.audio is not None
    expected = np.frombuffer(answer.samples or b"", "<f4")
    assert output.audio.samples.shape == expected.shape == (1920 * (len(followed.best) - 1),)
    assert output.finish_reason == "stop"
    assert apart(output.audio.samples, expected) < WITHIN


def test_speech_is_the_librarys_and_streams(system: System, library: Reference, prompts: list[dict[str, Any]]) -> None:
    outputs = system.ask(*prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(system, library, prompt, output)
    assert len({output.audio.samples.tobytes() for output in outputs if output.audio is not None}) == len(prompts)
    _, deltas = system.run(system.observe(prompts[0]))
    pieces = [delta for delta in deltas if isinstance(delta, AudioDelta)]
    assert len(pieces) > 5
    assert {delta.sample_rate for delta in pieces} == {24000}


@pytest.mark.nightly  # test_truth_killed_mimo_audio
@pytest.mark.parametrize("stage", ["backbone", "vocoder"])
def test_killed_at_work(system: System, library: Reference, prompts: list[dict[str, Any]], stage: str) -> None:
    """At the third piece, others being in the same worker."""

    async def body() -> list[RequestOutput]:
        heard = 0

        def kill(delta: Delta) -> None:
            nonlocal heard
            heard += isinstance(delta, AudioDelta)
            if heard == 3:
                heard += 1
                system.kill(stage)

        tasks = [system.collect(prompts[0], kill), *(system.collect(prompt) for prompt in prompts[1:])]
        return await asyncio.gather(*tasks)

    outputs = system.in_time(body, lambda outputs: outputs[0].metrics.attempts > 1)
    assert outputs[0].metrics.attempts == 2
    for prompt, output in zip(prompts, outputs, strict=True):
        check(system, library, prompt, output)


def test_the_command_needs_a_file(checkpoint: Path) -> None:
    done = segue("generate", str(checkpoint), "Hello there")
    assert (done.returncode, done.stdout) == (2, "")
    assert "this model's output needs a file: give --output with one of .wav" in done.stderr


def test_what_it_does_not_give_is_named(system: System) -> None:
    with pytest.raises(InvalidRequest, match="modalities has 'text'; this model gives audio"):
        system.ask({**asked("Hello"), "modalities": ["text"]})
    with pytest.raises(NotFound, match="nova"):
        system.ask(asked("Hello", "nova"))
