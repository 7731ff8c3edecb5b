"""A graph whose last model goes on with appended text: what another model writes is said word by word as it comes, and
the speech is what the model's own package makes of the same text as it arrives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from server_process import tiny
from truth_system import System

from segue import ModelGraph

GOLDEN = Path(__file__).parents[2] / "models" / "speech" / "qwen3_tts" / "golden"
EVERY = 7
"""Of the samples, one is recorded."""
CASE = next(case for case in json.loads((GOLDEN / "cases.json").read_text()) if case["name"] == "arriving")


@pytest.mark.nightly
def test_what_is_written_is_said_word_by_word(tmp_path: Path) -> None:
    graph = ModelGraph("appended")
    graph.model("think", tiny(tmp_path / "qwen3", "qwen3"))
    graph.model("speak", tiny(tmp_path / "qwen3-tts", "qwen3-tts"), main=True)
    graph.edge("think", "speak")
    graph.reuse("repeat", "speak")  # both places say it at once, in the same workers
    graph.edge("think", "repeat")
    prompt = {
        "messages": [{"role": "user", "content": "Say something."}],
        "modalities": ["text", "audio", "repeat.audio"],
        "voice": CASE["given"]["speaker"].title(),
        "sampling": {
            "think.llm": {"structured_outputs": {"choice": [CASE["given"]["text"]]}, "temperature": 0.0},
            "speak.talker": {"temperature": 0.0, "max_tokens": CASE["max_tokens"]},
            "repeat.talker": {"temperature": 0.0, "max_tokens": 5},
        },
    }
    system = System(graph)
    try:
        output = system.run(system.collect(prompt))
    finally:
        system.close()
    expected = load_file(GOLDEN / "golden.safetensors")["arriving.samples"]
    assert output.text == CASE["given"]["text"]
    assert output.audio is not None
    samples = output.audio.samples[::EVERY]
    assert samples.shape == expected.shape
    assert float(np.abs(samples - expected).max()) < 2e-4
    repeated = output.models["repeat"].audio
    assert repeated is not None
    assert 0 < len(repeated.samples) < len(output.audio.samples), "it has a limit of its own"
    assert len(output.token_ids["repeat.talker"]) == 5
