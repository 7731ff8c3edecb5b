"""Models that see or hear with their language model on two ranks: the replies of one process."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from multimodal_family import Run, Stages, answer, cases_of, processed
from rank_process import Second

from segue.models.omni.multimodal_lm.llm import LLM
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from selection import daily


@pytest.mark.parametrize("family", daily(("qwen2.5-vl", "gemma3-vision", "qwen2-audio"), ("qwen2.5-vl",)))
def test_two_equal_one(family: str, tmp_path: Path, second: Second) -> None:
    """M-RoPE, images that see each other, sound: in one batch, prefill in pieces, and after prefix hits."""
    directory = tmp_path / family
    tiny.make(family, directory)
    cases = cases_of(family)[-3:]  # with several media each
    expected = {case.name: answer(directory, processed(directory, case)) for case in cases}
    stages = Stages(directory)
    whole = stages.llm.weight_bytes
    with second.led(directory) as led:
        assert led.weight_bytes < whole
        stages.llm = cast(LLM, led)
        run = Run(stages, max_tokens_per_step=19)
        assert run(cases) == expected
        assert run(cases) == expected
        assert all(run.cached.values())
