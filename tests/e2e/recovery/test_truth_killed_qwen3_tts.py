"""kill -9 of a worker of Qwen3-TTS while it speaks: rows and samples are those of the package, nothing twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from server_process import tiny
from truth_system import System

from segue.messages.deltas import AudioDelta, Delta
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.outputs import RequestOutput

pytestmark = pytest.mark.nightly  # test_truth_killed kills a talker and a vocoder every time

GOLDEN = Path(__file__).parents[2] / "models" / "speech" / "qwen3_tts" / "golden"
EVERY = 7
"""Of the samples, one is recorded."""
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads((GOLDEN / "cases.json").read_text())}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tiny(tmp_path_factory.mktemp("qwen3-tts") / "tiny", "qwen3-tts"))
    yield system
    system.close()


def prompt(case: dict[str, Any]) -> dict[str, Any]:
    given = case["given"]
    return {
        "messages": [{"role": "user", "content": given["text"]}],
        "modalities": ["audio"],
        "voice": given["speaker"].title(),
        "options": {"language": given["language"].lower()} if "language" in given else {},
        "sampling": {"talker": SamplingParams(temperature=0.0, max_tokens=case["max_tokens"])},
    }


def check(output: RequestOutput, name: str) -> None:
    golden = load_file(GOLDEN / "golden.safetensors")
    assert output.token_ids["talker"][:-1] == golden[f"{name}.codes"][:, 0].tolist()
    assert output.audio is not None
    samples = output.audio.samples[::EVERY]
    assert samples.shape == golden[f"{name}.samples"].shape
    assert float(np.abs(samples - golden[f"{name}.samples"]).max()) < 1e-4


@pytest.mark.parametrize("stage", ["vocoder", "talker"])
def test_killed_at_work(system: System, stage: str) -> None:
    """At the first audio, another request being in the same worker."""

    async def body() -> RequestOutput:
        killed = False

        def kill(delta: Delta) -> None:
            nonlocal killed
            if isinstance(delta, AudioDelta) and not killed:
                killed = True
                system.kill(stage)

        spoken, other = await asyncio.gather(
            system.collect(prompt(CASES["dialect"]), kill), system.collect(prompt(CASES["plain"]))
        )
        assert killed
        check(spoken, "dialect")
        check(other, "plain")
        return spoken

    output = system.in_time(body, lambda output: output.metrics.attempts > 1)
    assert output.metrics.attempts == 2
