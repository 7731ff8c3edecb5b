"""Models with media, their language models on two processes: the same answers as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from truth_system import BY_NAME, System, Truth

from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.tiny import presets as tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_model_that_speaks(tiny_dir: Path, truth: Truth, assets: Path) -> None:
    """Tokens, codes and samples are the library's; the default for drafts is the thinker's alone."""
    divided = {"encoder": {"fuse_with": None}, "thinker": {"tensor_parallel": 2}, "talker": {"tensor_parallel": 2}}
    system = System(tiny_dir, stages=divided, defaults={"speculation": {"method": "ngram", "adaptive": False}})
    try:
        cases = [BY_NAME["image"], BY_NAME["text"]]
        for output, case in zip(system.ask(*(case.prompt(assets) for case in cases)), cases, strict=True):
            truth.check(output, case)
    finally:
        system.close()
