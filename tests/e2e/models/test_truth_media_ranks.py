"""A model that sees, its language model on two processes: the same tokens as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from truth_system import System

from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.tiny import presets as tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def test_the_same_tokens(tmp_path: Path, assets: Path) -> None:
    tiny.make("qwen2.5-vl", tmp_path)
    contents: list[list[dict[str, Any]]] = [
        [{"type": "image", "image": assets / "photo.jpg"}, {"type": "text", "text": "what is in the image?"}],
        [{"type": "text", "text": "write a few words about the sea"}],
    ]
    asked = [{"messages": [{"role": "user", "content": content}], "sampling": GREEDY} for content in contents]
    divided = {"encoder": {"fuse_with": None}, "llm": {"tensor_parallel": 2}}
    answers = []
    for stages in ({}, divided):
        system = System(tmp_path, stages=stages)
        try:
            answers.append([output.token_ids["llm"] for output in system.ask(*asked)])
        finally:
            system.close()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
