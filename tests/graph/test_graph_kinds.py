"""Engine kinds: a plan survives the way to a worker in the type of its kind, and nobody else compares names."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec

import segue
from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.kinds.registry import kinds, plan_from
from segue.graph.stage_graph import StageGraph

SOURCE = Path(segue.__file__).parent
OF_KINDS = (SOURCE / "graph" / "kinds", SOURCE / "worker" / "kinds")


def test_plans_travel_in_the_type_of_their_kind() -> None:
    g = StageGraph("three")
    g.stage("writer", "autoregressive", takes={"text"})
    g.stage("denoiser", "diffusion")
    g.stage("decoder", "module", gives={"image"})
    g.edge("writer", "denoiser")
    g.edge("denoiser", "decoder")
    file = {
        "stages": {
            "writer": {"speculation": {"method": "ngram"}, "sampling": {"temperature": 0.5}, "lora": {}},
            "denoiser": {"cfg_parallel": 2, "gguf": "/srv/model.gguf"},
        }
    }
    plan = load_plan(g, file, hardware=Hardware(cpus=4, memory_bytes=1 << 34))
    for stage in plan.stages.values():
        assert type(stage) is kinds()[stage.engine].plan
        assert plan_from(msgspec.to_builtins(stage)) == stage
    assert plan.stages["denoiser"].ranks == 2


def test_only_kinds_compare_the_names_of_engines() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {ast.unparse(node)}"
        for path in SOURCE.rglob("*.py")
        if not any(path.is_relative_to(folder) for folder in OF_KINDS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.match_case) and _names(node) & set(kinds())
    ]
    assert not found


def _names(node: ast.Compare | ast.match_case) -> set[object]:
    """The constants that a comparison or a case compares with."""
    compared = [node.pattern] if isinstance(node, ast.match_case) else [node.left, *node.comparators]
    return {part.value for one in compared for part in ast.walk(one) if isinstance(part, ast.Constant)}
