"""kill -9 of a worker of MiMo-Audio while it speaks: rows are those of the published code, samples those of a run
without a kill, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from server_process import tiny
from truth_system import SAME, System

from segue.messages.deltas import Delta
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.outputs import RequestOutput

GOLDEN = Path(__file__).parents[2] / "models" / "speech" / "mimo_audio" / "golden" / "golden.safetensors"
DEPLOYMENT = {"stages": {"llm": {"options": {"audio_temperature": 0}}, "vocoder": {"options": {"right_frames": 8}}}}
"""Few frames ahead, so that audio comes long before the end."""
PROMPT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the sea is calm tonight."}],
    "modalities": ["text", "audio"],
    "sampling": {"llm": SamplingParams(temperature=0.0, max_tokens=80)},
}
NAME = "said in capitals"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tiny(tmp_path_factory.mktemp("mimo-audio") / "tiny", "mimo-audio"), **DEPLOYMENT)
    yield system
    system.close()


@pytest.mark.parametrize("stage", ["llm", pytest.param("vocoder", marks=pytest.mark.nightly)])
def test_killed_at_work(system: System, stage: str) -> None:
    """At the tenth text, while the reply goes on."""
    [alone] = system.ask(PROMPT)

    async def body() -> RequestOutput:
        heard = 0

        def kill(delta: Delta) -> None:
            nonlocal heard
            heard += 1
            if heard == 10:
                system.kill(stage)

        output, other = await asyncio.gather(system.collect(PROMPT, kill), system.collect(PROMPT))
        for one in (output, other):
            assert one.token_ids["llm"] == load_file(GOLDEN)[f"{NAME}.rows"][:, 0].tolist()
            assert one.text == alone.text
            assert one.audio is not None
            assert alone.audio is not None
            assert one.audio.samples.shape == alone.audio.samples.shape
            assert float(np.abs(one.audio.samples - alone.audio.samples).max()) < SAME
        return output

    output = system.in_time(body, lambda output: output.metrics.attempts > 1)
    assert output.metrics.attempts == 2
