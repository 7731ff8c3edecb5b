"""`segue bench bagel`: texts and images that are answered in writing, images that are drawn, and images that are
edited."""

from __future__ import annotations

from typing import Any

from segue.bench.plain.comparison import Prompt, Workload

_SIDE = 256
"""Pixels of the sides of an image that is sent."""


def drawn_image(seed: int) -> Any:
    """[height, width, 3] uint8: squares of 16 pixels, each of a colour of its own."""
    import numpy as np

    squares = np.random.default_rng(seed).integers(0, 256, (_SIDE // 16, _SIDE // 16, 3), dtype=np.uint8)
    return squares.repeat(16, axis=0).repeat(16, axis=1)


def reply(seed: int) -> Prompt:
    return _asked("text", f"Which train leaves platform {seed % 100} at {seed % 12 + 1} o'clock, and where does it go?")


def look(seed: int) -> Prompt:
    return _asked("text", "What do you see in this image?", _shown(seed))


def draw(seed: int) -> Prompt:
    return _asked("image", f"A night train with {seed % 12 + 1} carriages at platform {seed % 100}, in the rain")


def edit(seed: int) -> Prompt:
    return _asked("image", "Turn the squares into the windows of a train.", _shown(seed))


def _shown(seed: int) -> dict[str, Any]:
    return {"type": "image", "image": drawn_image(seed)}


def _asked(wanted: str, said: str, *media: dict[str, Any]) -> Prompt:
    content = [*media, {"type": "text", "text": said}]
    return {"messages": [{"role": "user", "content": content}], "modalities": [wanted]}


WORKLOAD = Workload(
    name="bagel",
    kinds={"text → text": reply, "image → text": look, "text → image": draw, "image → image": edit},
    stage="llm",
    config={},
    loop="segue.bench.plain.bagel_loop",
    denoiser="denoiser",
)
