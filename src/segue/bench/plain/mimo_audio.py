"""`segue bench mimo-audio`: texts that are said, recordings that are answered in writing, and in speech."""

from __future__ import annotations

from typing import Any

from segue.bench.plain.comparison import Prompt, Workload

RATE = 24_000
_SECONDS = 3
"""Length of a recording."""


def recording(seed: int) -> Any:
    """[n] float32 samples: three other tones every tenth of a second, and noise."""
    import numpy as np

    drawn, time = np.random.default_rng(seed), np.arange(_SECONDS * RATE) / RATE
    tones = drawn.uniform((100, 0), (6000, 6), (3, 10 * _SECONDS, 2)).repeat(RATE // 10, axis=1)
    wave = np.sin(2 * np.pi * tones[..., 0] * time + tones[..., 1]).sum(axis=0)
    return (0.1 * wave + 0.01 * drawn.standard_normal(len(time))).astype(np.float32)


def say(seed: int) -> Prompt:
    content = f"Platform {seed % 100}: the night train to Turin leaves at {seed % 12 + 1} o'clock."
    return {"messages": [{"role": "user", "content": content}], "modalities": ["audio"]}


def write(seed: int) -> Prompt:
    return {"messages": _heard(seed, "Write down what you hear."), "modalities": ["text"]}


def answer(seed: int) -> Prompt:
    return {"messages": _heard(seed), "modalities": ["audio"]}


def _heard(seed: int, *texts: str) -> list[dict[str, Any]]:
    content = [{"type": "audio", "audio": (recording(seed), RATE)}, *({"type": "text", "text": one} for one in texts)]
    return [{"role": "user", "content": content}]


WORKLOAD = Workload(
    name="mimo-audio",
    kinds={"text → speech": say, "speech → text": write, "speech → speech": answer},
    stage="llm",
    config={"stages": {"llm": {"options": {"audio_temperature": 0}}}},
    loop="segue.bench.plain.mimo_audio_loop",
)
