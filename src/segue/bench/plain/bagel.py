"""`segue bench bagel`: texts and images that are answered in writing.

What it draws will be further kinds of requests: a prompt here, and its loop in `bagel_loop`."""

from __future__ import annotations

from typing import Any

from segue.bench.plain.comparison import Prompt, Workload

_SIDE = 256
"""Pixels of an image's sides."""


def drawn_image(seed: int) -> Any:
    """[height, width, 3] uint8: squares of 16 pixels, each of a colour of its own."""
    import numpy as np

    squares = np.random.default_rng(seed).integers(0, 256, (_SIDE // 16, _SIDE // 16, 3), dtype=np.uint8)
    return squares.repeat(16, axis=0).repeat(16, axis=1)


def reply(seed: int) -> Prompt:
    return _asked(f"Which train leaves platform {seed % 100} at {seed % 12 + 1} o'clock, and where does it go?")


def look(seed: int) -> Prompt:
    return _asked("What do you see in this image?", {"type": "image", "image": drawn_image(seed)})


def _asked(question: str, *media: dict[str, Any]) -> Prompt:
    content = [*media, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "modalities": ["text"]}


WORKLOAD = Workload(
    name="bagel",
    kinds={"text → text": reply, "image → text": look},
    stage="llm",
    config={},
    loop="segue.bench.plain.bagel_loop",
)
