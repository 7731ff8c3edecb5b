"""The stage key `lora`, and the keys of quantised weights and caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan, stage_overrides
from segue.graph.deployment.options import LoraPlan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

MACHINE = Hardware(2, 1 << 34)


def graph() -> StageGraph:
    g = StageGraph("one")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("voice", "module", gives={"audio"})
    g.edge("llm", "voice")
    return g


def lora(stage: Any, overrides: dict[str, Any] | None = None) -> LoraPlan | None:
    plan = load_plan(graph(), {"stages": {"llm": stage}}, hardware=MACHINE, overrides=overrides)
    assert plan.stages["voice"].lora is None
    return plan.stages["llm"].lora


def test_adapters_of_the_file_and_of_the_caller() -> None:
    assert lora({}) is None
    assert lora({"lora": None}) is None
    assert lora({"lora": {}}) == LoraPlan({}, 64, 16)
    stage = {"lora": {"adapters": {"a": "/srv/a", "b": "here"}, "max_rank": 8}}
    caller = stage_overrides(None, lora={"adapters": {"c": "~/c", "a": "/other"}, "max_adapters": 5, "max_rank": 9})
    here = {"a": "/srv/a", "b": str(Path("here").absolute())}
    assert lora(stage) == LoraPlan(here, 8, 16)
    assert lora(stage, caller) == LoraPlan({**here, "c": str(Path("~/c").expanduser())}, 8, 5)
    assert lora({}, stage_overrides(None, lora={})) == LoraPlan()


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"lora": 3}, "stages.llm.lora is 3; it must be a mapping"),
        ({"lora": {"adapter": {}}}, "did you mean 'adapters'"),
        ({"lora": {"adapters": {"a": 3}}}, "stages.llm.lora.adapters.a is 3; it must be the directory"),
        ({"lora": {"adapters": {"a": "/a", "b": "/b"}, "max_adapters": 1}}, "at least 2, the number of adapters"),
        ({"lora": {"max_rank": 0}}, "stages.llm.lora.max_rank is 0"),
        ({"lora": {}, "deterministic": True}, "stages.llm.lora cannot be combined with deterministic"),
        (
            {"quantization": "int9"},
            "stages.llm.quantization is 'int9'; it must be one of none, bfloat16, int8, int4, fp8",
        ),
        ({"kv_dtype": "int8"}, "stages.llm.kv_dtype is 'int8'; it must be one of auto, fp8"),
    ],
)
def test_what_cannot_be(stage: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora(stage)


def test_bfloat16_is_a_quantization_of_the_cpu() -> None:
    g = StageGraph("words")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    plan = load_plan(g, {"defaults": {"quantization": "bfloat16"}}, hardware=MACHINE)
    assert plan.stages["llm"].quantization == "bfloat16"
    with pytest.raises(ConfigError, match=r"stages.llm.quantization is 'bfloat16', which is for stages on a CPU"):
        load_plan(
            g,
            {"stages": {"llm": {"devices": "cuda:0", "quantization": "bfloat16"}}},
            hardware=Hardware(2, 1 << 34, (1 << 36,)),
        )


def test_a_denoiser_can_have_adapters() -> None:
    g = StageGraph("pictures")
    g.stage("denoiser", "diffusion", takes={"text"}, gives={"image"})
    plan = load_plan(g, {"stages": {"denoiser": {"lora": {"adapters": {"ink": "/srv/ink"}}}}}, hardware=MACHINE)
    assert plan.stages["denoiser"].lora == LoraPlan({"ink": "/srv/ink"}, 64, 16)
    with pytest.raises(ConfigError, match=r"denoiser.kv_dtype is for autoregressive stages"):
        load_plan(g, {"stages": {"denoiser": {"kv_dtype": "fp8"}}}, hardware=MACHINE)


def test_for_autoregressive_stages_alone() -> None:
    for key, value in (("lora", {}), ("quantization", "int8"), ("kv_dtype", "fp8")):
        with pytest.raises(ConfigError, match=f"stages.voice.{key} is for autoregressive (and diffusion )?stages"):
            load_plan(graph(), {"stages": {"voice": {key: value}}}, hardware=MACHINE)
    plan = load_plan(
        graph(),
        hardware=MACHINE,
        overrides=stage_overrides(None, quantization="int8", kv_dtype="fp8", scheduling="fair", lora={}),
    )
    assert (plan.stages["llm"].quantization, plan.stages["llm"].kv_dtype) == ("int8", "fp8")
    assert plan.stages["voice"].asked_of_family == ()
    assert plan.stages["llm"].scheduling == "fair"
