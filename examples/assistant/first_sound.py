"""Seconds to the first sound of the assistant: its models as one graph, and the same models one after the other.

    python examples/assistant/first_sound.py assets/speech.wav --tokens 200

Both sides have the same checkpoints, questions, seeds and machine; one request runs at a time. One request of each
side, which is not counted, warms it up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from assistant import CHECKPOINTS, aloud, as_question, assistant

from segue import AsyncOmni
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


async def as_graph(repeat: int, recording: Path, tokens: int) -> list[float]:
    async with AsyncOmni(assistant) as omni:
        prompts = [
            {
                "messages": asked(recording),
                "modalities": ["audio"],
                "seed": seed,
                "sampling": {"think.llm": {"max_tokens": tokens}},
            }
            for seed in range(repeat + 1)
        ]
        return [await first_sound(omni, prompt) for prompt in prompts][1:]


async def one_after_the_other(repeat: int, recording: Path, tokens: int) -> list[float]:
    hear, think, speak = (AsyncOmni(CHECKPOINTS / name) for name in ("whisper", "qwen3", "pocket-tts"))
    async with hear, think, speak:
        found = []
        for seed in range(repeat + 1):
            begun = time.perf_counter()
            heard = await hear.generate({"messages": asked(recording), "seed": seed})
            question = {"messages": as_question(heard.text), "seed": seed, "sampling": {"llm": {"max_tokens": tokens}}}
            reply = await think.generate(question)
            before = time.perf_counter() - begun
            said = {"messages": [{"role": "user", "content": aloud(reply.text) or "."}], "modalities": ["audio"]}
            found.append(before + await first_sound(speak, {**said, "seed": seed}))
        return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of the reply; default: %(default)s")
    parser.add_argument("--repeat", type=int, default=5, help="requests per side; default: %(default)s")
    arguments = parser.parse_args()
    for name, side in (("one graph", as_graph), ("one after the other", one_after_the_other)):
        times = asyncio.run(side(arguments.repeat, arguments.recording, arguments.tokens))
        print(
            f"{name}: {statistics.median(times):.3f} s to the first sound (from {min(times):.3f} to {max(times):.3f})"
        )


if __name__ == "__main__":
    main()
