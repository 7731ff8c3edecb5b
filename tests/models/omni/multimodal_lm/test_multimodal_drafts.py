"""Drafts of an EAGLE-3 head for models that see: the replies stay those of `generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eagle_head import eagle_drafts
from multimodal_family import Run, Stages, answer, cases_of, context, processed

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.models.omni.multimodal_lm.graph import graph
from segue.models.omni.multimodal_lm.tiny import presets as tiny

BLOCKS = 600


@pytest.mark.parametrize("family", [pytest.param("qwen2.5-vl", marks=pytest.mark.nightly), "qwen3-vl"])
def test_drafts_of_an_eagle_head(tmp_path: Path, family: str) -> None:
    """The second time with prefixes from the cache."""
    directory, cases = tmp_path / "model", cases_of(family)
    tiny.make(family, directory)
    expected = {case.name: answer(directory, processed(directory, case)) for case in cases}
    stages = Stages(directory)
    run = Run(stages)
    stage_graph = graph(json.loads((directory / "config.json").read_text()))
    llm = context(directory, "llm")
    drafts = eagle_drafts(stage_graph, llm, stages.llm, tmp_path / "head", expected.values(), BLOCKS)
    config = AutoregressiveConfig(num_blocks=BLOCKS, block_size=16, max_tokens_per_step=64, enforce_eager=True)
    run.engine = AutoregressiveEngine(stages.llm, config, speculation=drafts)
    for _ in range(2):
        assert run(cases) == expected
    assert all(run.cached.values())
    stats = run.engine.stats()
    assert stats["spec_active"] == 1
    assert 0 < stats["spec_accepted_tokens_total"] < stats["spec_draft_tokens_total"]
