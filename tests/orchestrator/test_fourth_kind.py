"""An engine kind of another package: its folder and one entry point are all that it needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.kinds import registry
from segue.graph.render import as_text
from segue.messages.errors import ConfigError
from segue.orchestrator.omni.async_omni import AsyncOmni

TOY_ENGINE = str(Path(__file__).parents[1] / "toy_engine")
HERE = Hardware(cpus=2, memory_bytes=1 << 34)


@pytest.fixture
def model_dir(toy_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of a family with a stage of the kind, whose package is installed for the test."""
    monkeypatch.syspath_prepend(TOY_ENGINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TOY_ENGINE, os.environ["PYTHONPATH"]]))
    (tmp_path / "config.json").write_text('{"architectures": ["LeakyModel"]}')
    caches = (registry.kinds, registry.kind_keys, registry.rank_keys)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_its_stages_are_planned(model_dir: Path) -> None:
    from segue_leaky.family import graph
    from segue_leaky.kind import LeakyPlan

    plan = load_plan(graph({}), {"stages": {"sum": {"decay": 0.5, "max_batch": 7}}}, hardware=HERE)
    stage = plan.stages["sum"]
    assert isinstance(stage, LeakyPlan)
    assert (stage.decay, stage.max_batch) == (0.5, 7)
    assert load_plan(graph({}), hardware=HERE).stages["sum"].max_batch == 2, "the kind's own default"
    [row] = [line.split() for line in as_text(plan).splitlines() if line.startswith("0")]
    assert row[1:3] == ["sum", "leaky"]
    for wrong, said in (
        ({"sum": {"decay": 2}}, "stages.sum.decay is 2; it must be a number above 0 and at most 1"),
        ({"sum": {"block_size": 8}}, "stages.sum.block_size is for autoregressive stages; 'sum' has the leaky engine"),
        ({"input": {"decay": 0.5}}, "stages.input.decay is for leaky stages; 'input' has the module engine"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_plan(graph({}), {"stages": wrong}, hardware=HERE)
        assert str(refused.value).startswith(said)


def test_its_stages_run_in_workers(model_dir: Path) -> None:
    async def run() -> None:
        async with AsyncOmni(model_dir, config={"stages": {"sum": {"decay": 0.5}}}) as omni:
            prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 4], [5], [8, 8])]
            outputs = await asyncio.gather(*map(omni.generate, prompts))
            assert [output.embedding.tolist() for output in outputs] == [[6.125], [5.0], [12.0]]
            assert omni.card.sampling_stages == []

    asyncio.run(run())


def test_a_stage_model_must_have_what_its_engine_calls(model_dir: Path) -> None:
    from segue_leaky.family import graph

    from segue.worker.kinds.kind import check_contract

    stage = load_plan(graph({}), hardware=HERE).stages["sum"]
    with pytest.raises(ConfigError, match="its stage model object has no add; the leaky engine needs a segue_leaky"):
        check_contract(stage, object())
