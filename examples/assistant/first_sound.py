"""Seconds to the first sound of the assistant: its models as one graph, and the same models one after the other.

    python examples/assistant/first_sound.py assets/speech.wav --tokens 200 --out out/first-sound.json

Both sides have the same checkpoints, questions, seeds and machine. They take turns, one request at a time; one request
of each side, which is not counted, warms it up. `python -m segue.bench.figures FILE` shows the results of a file.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from assistant import CHECKPOINTS, aloud, as_question, assistant

from segue import AsyncOmni
from segue.bench.first_sound import markdown, sound_result
from segue.bench.harness.hardware import machine
from segue.bench.harness.results import write_result
from segue.messages.deltas import AudioDelta


def asked(recording: Path) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "audio", "audio": recording}]}]


async def first_sound(omni: AsyncOmni, prompt: dict[str, Any]) -> float:
    """Seconds from now until the request's first audio; the rest of it is cancelled."""
    begun = time.perf_counter()
    async with aclosing(omni.stream(omni.request(prompt))) as deltas:
        async for delta in deltas:
            if isinstance(delta, AudioDelta):
                return time.perf_counter() - begun
    raise SystemExit("the reply has nothing to say: give another recording, seed or number of tokens")


async def as_graph(omni: AsyncOmni, recording: Path, tokens: int, seed: int) -> float:
    sampling = {"think.llm": {"max_tokens": tokens, "ignore_eos": True}}
    prompt = {"messages": asked(recording), "modalities": ["audio"], "seed": seed, "sampling": sampling}
    return await first_sound(omni, prompt)


async def one_after_the_other(models: tuple[AsyncOmni, ...], recording: Path, tokens: int, seed: int) -> float:
    hear, think, speak = models
    begun = time.perf_counter()
    heard = await hear.generate({"messages": asked(recording), "seed": seed})
    question = {
        "messages": as_question(heard.text),
        "seed": seed,
        "sampling": {"llm": {"max_tokens": tokens, "ignore_eos": True}},
    }
    reply = await think.generate(question)
    before = time.perf_counter() - begun
    said = {"messages": [{"role": "user", "content": aloud(reply.text) or "."}], "modalities": ["audio"], "seed": seed}
    return before + await first_sound(speak, said)


async def measure(repeat: int, recording: Path, tokens: int) -> list[tuple[float, float]]:
    """Of each request: the seconds of both sides."""
    hear, think, speak = models = tuple(AsyncOmni(CHECKPOINTS / name) for name in ("whisper", "qwen3", "pocket-tts"))
    async with AsyncOmni(assistant) as omni, hear, think, speak:
        found = []
        for seed in range(repeat + 1):
            joined = await as_graph(omni, recording, tokens, seed)
            found.append((joined, await one_after_the_other(models, recording, tokens, seed)))
        return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the reply; default: %(default)s")
    parser.add_argument("--repeat", type=int, default=5, help="requests per side; default: %(default)s")
    parser.add_argument("--out", type=Path, help="file of the results")
    arguments = parser.parse_args()
    before = machine()
    joined, chained = zip(*asyncio.run(measure(arguments.repeat, arguments.recording, arguments.tokens)), strict=True)
    result = sound_result(before, arguments.tokens, [*joined], [*chained])
    if arguments.out is not None:
        write_result(result, arguments.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
