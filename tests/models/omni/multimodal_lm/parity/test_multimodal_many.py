"""Thirty prompts of mixed lengths in one batch, with media and without: the replies of `generate`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from multimodal_family import FAMILIES, Case, Run, Stages, answer, processed

from segue.models.omni.multimodal_lm.tiny import presets as tiny
from selection import daily

TOKENS = 10
TEXT = "what is this an image of the sea and some hills behind it or who spoke first in that old house"
KINDS = {"qwen2-audio": ("audio",), "gemma3-vision": ("image",), "llama3.2-vision": ("image",)}


def drawn(family: str, count: int = 30) -> list[Case]:
    """Every third without media; the others with one to three images or recordings, or with a clip."""
    rng = np.random.default_rng(7)
    cases = []
    for number in range(count):
        text = " ".join(rng.choice(TEXT.split(), rng.integers(1, 50)))
        kind = rng.choice(KINDS.get(family, ("image", "video")))
        media = tuple((str(kind), int(seed)) for seed in rng.integers(1, 60, 1 if kind == "video" else number % 3))
        cases.append(Case(str(number), text, media if number % 3 else ()))
    return cases


@pytest.mark.parametrize("family", daily(FAMILIES, ("qwen2.5-vl", "qwen2-audio")))
def test_thirty_prompts_in_one_batch(family: str, tmp_path: Path) -> None:
    tiny.make(family, tmp_path)
    stages = Stages(tmp_path)
    cases = drawn(family)
    given = {case.name: processed(tmp_path, case) for case in cases}
    expected = {name: answer(tmp_path, inputs, TOKENS) for name, inputs in given.items()}
    assert len({inputs["input_ids"].shape[1] for inputs in given.values()}) > 15
    assert len({tuple(reply) for reply in expected.values()}) > 24
    run = Run(stages, num_blocks=1200, max_tokens_per_step=96)
    assert run(cases, TOKENS) == expected
