"""Higgs Audio v2 through the whole system: its speech is the library's, streamed, and after kill -9 of each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server_process import tiny
from truth_system import System, apart

from segue.engines.contract import LoadContext
from segue.messages.deltas import AudioDelta, Delta
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.models.speech.higgs_audio_v2.input import InputProcessor
from segue.models.speech.higgs_audio_v2.library import HiggsAudioV2ForConditionalGeneration
from segue.models.speech.higgs_audio_v2.loading import load_codec, load_codec_config, load_config
from segue.orchestrator.omni.outputs import RequestOutput

pytestmark = pytest.mark.nightly  # test_truth_csm has the same stages

ROWS, GROUPS, HOP = 90, 8, 960
WITHIN = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("higgs") / "tiny", "higgs-audio-v2")


@pytest.fixture(scope="module")
def system(checkpoint: Path) -> Iterator[System]:
    system = System(checkpoint)
    yield system
    system.close()


def asked(text: str, **options: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "modalities": ["audio"],
        "options": options,
        "sampling": {"llm": SamplingParams(temperature=0.0, max_tokens=ROWS)},
    }


PROMPTS = [asked("Name three rivers."), asked("Hello there"), asked("Hello there", instructions="A large hall.")]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, system: System) -> list[tuple[list[int], np.ndarray]]:
    """(codes 0, samples) of `generate` and the codec, for each prompt."""
    ctx = LoadContext(checkpoint, "input", torch.device("cpu"), torch.float32)
    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    codec, processor = load_codec(ctx, load_codec_config(checkpoint, load_config(ctx))), InputProcessor(ctx)
    answers = []
    for prompt in PROMPTS:
        ids = processor.process(system.omni.request(prompt))["token_ids"]
        with torch.inference_mode():
            [rows] = model.generate(input_ids=ids[None], do_sample=False, ras_win_len=None, max_new_tokens=ROWS)
            frames = len(rows) - 1 - GROUPS
            codes = torch.stack([rows[1 + book : 1 + book + frames, book] for book in range(GROUPS)])
            answers.append((rows[:, 0].tolist(), codec(codes.clip(0, 63)[None])[0].numpy()))
    assert len({len(codes) for codes, _ in answers}) == len(PROMPTS)
    return answers


def check(output: RequestOutput, expected: tuple[list[int], np.ndarray]) -> None:
    codes, samples = expected
    assert output.token_ids["llm"] == codes
    assert output.audio is not None
    assert output.audio.samples.shape == samples.shape == (HOP * (len(codes) - 1 - GROUPS),)
    assert output.finish_reason == "stop"
    assert apart(output.audio.samples, samples) < WITHIN


def test_speech_is_the_librarys_and_streams(system: System, expected: list) -> None:
    for output, answer in zip(system.ask(*PROMPTS), expected, strict=True):
        check(output, answer)
    output, deltas = system.run(system.observe(PROMPTS[0]))
    check(output, expected[0])
    assert len([delta for delta in deltas if isinstance(delta, AudioDelta)]) >= 4


@pytest.mark.parametrize("stage", ["llm", "vocoder"])
def test_killed_at_work(system: System, expected: list, stage: str) -> None:
    """At the first audio, others being in the same worker."""

    async def body() -> list[RequestOutput]:
        killed = False

        def kill(delta: Delta) -> None:
            nonlocal killed
            if isinstance(delta, AudioDelta) and not killed:
                killed = True
                system.kill(stage)

        tasks = [system.collect(PROMPTS[0], kill), *(system.collect(prompt) for prompt in PROMPTS[1:])]
        return await asyncio.gather(*tasks)

    outputs = system.in_time(body, lambda outputs: outputs[0].metrics.attempts > 1)
    for output, answer in zip(outputs, expected, strict=True):
        check(output, answer)


def test_what_it_does_not_have_is_named(system: System) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.llm\.min_p is 0\.2"):
        system.ask({**asked("Hello"), "sampling": {"llm": SamplingParams(min_p=0.2)}})
    with pytest.raises(InvalidRequest, match="modalities has 'text'; this model gives audio"):
        system.ask({**asked("Hello"), "modalities": ["text"]})
