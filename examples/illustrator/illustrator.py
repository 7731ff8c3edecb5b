"""An illustrator of three models: one writes a prompt, one draws it, one looks and sends it back, at most twice.

    segue tiny qwen3 out/qwen3 && segue tiny z-image out/z-image && segue tiny qwen2.5-vl out/qwen2.5-vl
    segue serve examples/illustrator/illustrator.py

`MODELS` names the folder of the checkpoints, if it is not `out`.
"""

from __future__ import annotations

import os
from pathlib import Path

from segue import ModelGraph
from segue.graph.parts import Outcome
from segue.messages.request import Request

CHECKPOINTS = Path(os.environ.get("MODELS", "out"))


def question(prompt: str) -> str:
    """What was to be drawn → the question about the image."""
    return f"Does the image show this? Answer yes, or say in one sentence what is wrong. {prompt.strip()}"


def remark(verdict: str) -> str:
    """What is wrong with the image → the next message to the model that wrote the prompt."""
    return f"The image is not right: {verdict.strip()} Write a better prompt, and nothing else."


def rejected(request: Request, judged: Outcome) -> bool:
    return not judged.text.strip().lower().startswith("yes")


illustrator = ModelGraph("illustrator")
illustrator.model("write", CHECKPOINTS / "qwen3", main=True)
illustrator.model("draw", CHECKPOINTS / "z-image")
illustrator.model("judge", CHECKPOINTS / "qwen2.5-vl")
illustrator.edge("write", "draw")
illustrator.edge("write", "judge", transform=question)
illustrator.edge("draw", "judge")
illustrator.edge("judge", "write", transform=remark, on=rejected, most=2, revises=True)
