"""Pocket TTS through the whole system: its speech is the library's, streamed, and after kill -9 of each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from truth_system import System, apart

from segue.engines.autoregressive.sample.sampler import code_uniforms
from segue.messages.deltas import AudioDelta, Delta
from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.sampling import SamplingParams
from segue.models.speech.pocket_tts.reference import Reference
from segue.models.speech.pocket_tts.tiny import presets as tiny
from segue.orchestrator.omni.outputs import RequestOutput

pytestmark = pytest.mark.nightly  # test_truth_pocket_tts_graph and test_server_pocket_tts run every time

WITHIN = 1e-4
SEED = 7
WIDTH = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pocket-tts")
    tiny.make(directory)
    return directory


@pytest.fixture(scope="module")
def system(checkpoint: Path) -> Iterator[System]:
    system = System(checkpoint)
    yield system
    system.close()


@pytest.fixture(scope="module")
def library(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def asked(text: str, voice: str, temperature: float) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "modalities": ["audio"],
        "voice": voice,
        "seed": SEED,
        "sampling": {"backbone": SamplingParams(temperature=temperature)},
    }


PROMPTS = [
    asked("Who is it, and what do you want from me?", "marius", 0.0),
    asked("It was late, and nobody had come to the old house on the hill for many years.", "alba", 0.7),
    asked("Hello there", "alba", 0.3),
]


@pytest.fixture(scope="module")
def expected(library: Reference) -> list[np.ndarray]:
    """The audio of each prompt, on the noise of its seed."""
    waves = []
    numbers = torch.from_numpy(code_uniforms(SEED, 0, 300, WIDTH))
    for prompt in PROMPTS:
        temperature = prompt["sampling"]["backbone"].temperature
        noise = torch.special.ndtri(numbers) * temperature**0.5 if temperature else None
        waves.append(library.spoken(prompt["messages"][0]["content"], prompt["voice"], noise=noise)[1].numpy())
    return waves


def check(output: RequestOutput, wave: np.ndarray) -> None:
    assert output.audio is not None
    assert output.audio.samples.shape == wave.shape
    assert output.finish_reason == "stop"
    assert apart(output.audio.samples, wave) < WITHIN
    assert 0.02 < float(np.sqrt(np.square(wave).mean())) < 0.5


def test_speech_is_the_librarys_and_streams(system: System, expected: list[np.ndarray]) -> None:
    for output, wave in zip(system.ask(*PROMPTS), expected, strict=True):
        check(output, wave)
    assert len({wave.shape for wave in expected}) > 1
    _, deltas = system.run(system.observe(PROMPTS[0]))
    pieces = [delta for delta in deltas if isinstance(delta, AudioDelta)]
    assert len(pieces) > 4
    assert {delta.sample_rate for delta in pieces} == {24000}


@pytest.mark.parametrize("stage", ["backbone", "vocoder"])
def test_killed_at_work(system: System, expected: list[np.ndarray], stage: str) -> None:
    """At the second piece, others being in the same worker."""

    async def body() -> list[RequestOutput]:
        heard = 0

        def kill(delta: Delta) -> None:
            nonlocal heard
            heard += isinstance(delta, AudioDelta)
            if heard == 2:
                heard += 1
                system.kill(stage)

        tasks = [system.collect(PROMPTS[0], kill), *(system.collect(prompt) for prompt in PROMPTS[1:])]
        return await asyncio.gather(*tasks)

    outputs = system.in_time(body, lambda outputs: outputs[0].metrics.attempts > 1)
    assert outputs[0].metrics.attempts == 2
    for output, wave in zip(outputs, expected, strict=True):
        check(output, wave)


def test_what_it_does_not_give_is_named(system: System) -> None:
    with pytest.raises(InvalidRequest, match="modalities has 'text'; this model gives audio"):
        system.ask({**PROMPTS[0], "modalities": ["text"]})
    with pytest.raises(NotFound, match="nova"):
        system.ask(asked("Hello", "nova", 0.0))
