"""The key `speculation` of a stage: what it comes to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.deployment.options import SpeculationPlan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError


def plan_of(speculation: Any, **more: Any) -> SpeculationPlan | None:
    graph = StageGraph("toy")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    plan = load_plan(graph, {"stages": {"llm": {"speculation": speculation}}, **more}, hardware=Hardware(2, 1 << 30))
    return plan.stages["llm"].speculation


@pytest.mark.parametrize(
    ("written", "plan"),
    [
        (None, None),
        ({"method": "ngram"}, SpeculationPlan("ngram")),
        ({"method": "ngram", "tokens": 7, "ngram_max": 1}, SpeculationPlan("ngram", 7, ngram_min=1, ngram_max=1)),
        ({"method": "ngram", "ngram_min": 6}, SpeculationPlan("ngram", ngram_min=6, ngram_max=6)),
        ({"method": "draft", "model": "small"}, SpeculationPlan("draft", model="small")),
        ({"method": "mtp", "tokens": 1, "adaptive": False}, SpeculationPlan("mtp", 1, adaptive=False)),
    ],
)
def test_what_is_written_is_what_is_planned(written, plan):
    assert plan_of(written) == plan


def test_defaults_reach_every_autoregressive_stage_that_is_silent():
    assert plan_of({"method": "mtp"}, defaults={"speculation": {"method": "ngram"}}) == SpeculationPlan("mtp")
    graph = StageGraph("toy")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    plan = load_plan(graph, {"defaults": {"speculation": {"method": "ngram"}}}, hardware=Hardware(2, 1 << 30))
    assert plan.stages["llm"].speculation == SpeculationPlan("ngram")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("ngram", "stages.llm.speculation is 'ngram'; it must be a mapping with a method"),
        ({"tokens": 3}, "stages.llm.speculation has no method; it must be one of ngram, draft"),
        ({"method": "ngrams"}, "stages.llm.speculation.method is 'ngrams'; it must be one of .*'ngram'"),
        ({"method": "draft"}, "stages.llm.speculation.method is 'draft', which needs stages.llm.speculation.model"),
        ({"method": "draft", "model": 3}, "speculation.model is 3; it must be the directory of a checkpoint"),
        ({"method": "mtp", "model": "x"}, "speculation.model is 'x', but the method 'mtp' takes no model"),
        ({"method": "ngram", "tokens": 0}, "speculation.tokens is 0; it must be an integer of at least 1"),
        ({"method": "mtp", "ngram_max": 3}, "speculation.ngram_max is for the method 'ngram', not 'mtp'"),
        ({"method": "ngram", "ngram_min": 5, "ngram_max": 4}, "ngram_min is 5; it must be at most ngram_max"),
        ({"method": "ngram", "adaptive": "no"}, "speculation.adaptive is 'no'; it must be true or false"),
        ({"method": "ngram", "num_speculative_tokens": 3}, "'num_speculative_tokens'; write tokens instead"),
        ({"method": "ngram", "token": 3}, "no key 'token'.*'tokens'"),
    ],
)
def test_what_is_refused_is_named(written, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan_of(written)
    assert (caught.value.field or "").startswith("stages.llm.speculation")


def test_only_autoregressive_stages_speculate():
    graph = StageGraph("toy")
    graph.stage("vocoder", "module", takes={"text"}, gives={"audio"})
    written = {"stages": {"vocoder": {"speculation": {"method": "ngram"}}}}
    with pytest.raises(ConfigError, match="for autoregressive stages"):
        load_plan(graph, written, hardware=Hardware(2, 1 << 30))
