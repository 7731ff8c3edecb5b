"""What a deployment says of a Ray cluster."""

from __future__ import annotations

from typing import Any

import pytest

from segue.graph.deployment.deployment import Hardware, RayNode
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

AWAY = {"stages": {"talker": {"node": "b"}, "vocoder": {"node": ["server", "c"]}}}


def load(graph: StageGraph, **deployment: Any) -> Any:
    return load_plan(graph, {**AWAY, **deployment}, hardware=Hardware(8, 32 << 30)).ray


def test_every_node_of_the_deployment_gets_a_bundle(graph: StageGraph) -> None:
    assert load(graph) is None
    assert load(graph, placement="join") is None
    found = load(graph, placement="ray")
    assert (found.address, found.nodes) == ("auto", {"b": RayNode(), "c": RayNode()})
    own = {"num_cpus": 0, "num_gpus": 2, "accelerator_type": "H100", "resources": {"fast": 0.5}, "model": "/srv/m"}
    found = load(graph, placement="ray", ray={"address": "10.0.0.1:6379", "nodes": {"b": own}})
    assert found.address == "10.0.0.1:6379"
    assert found.nodes == {"b": RayNode(0, 2, "H100", {"fast": 0.5}, "/srv/m"), "c": RayNode()}


@pytest.mark.parametrize(
    ("deployment", "said"),
    [
        ({"placement": "rey"}, r"placement is 'rey'; it must be one of join, ray; did you mean 'ray'\?"),
        ({"ray": {"address": "auto"}}, "ray is set, but placement is not ray"),
        ({"placement": "ray", "stages": {}}, "placement is ray, but no stage has a node"),
        ({"placement": "ray", "ray": {"adress": "auto"}}, r"ray has no key 'adress'; did you mean 'address'\?"),
        ({"placement": "ray", "ray": {"address": 6379}}, "ray.address is 6379; it must be text"),
        ({"placement": "ray", "ray": {"nodes": {"d": {}}}}, "ray.nodes has 'd', which is the node of no stage"),
        (
            {"placement": "ray", "ray": {"nodes": {"b": {"gpus": 1}}}},
            "nodes.b has no key .gpus.; did you mean .num_gpus",
        ),
        (
            {"placement": "ray", "ray": {"nodes": {"b": {"num_gpus": -1}}}},
            "nodes.b.num_gpus is -1; it must be a n",
        ),
        ({"placement": "ray", "ray": {"nodes": {"b": {"num_cpus": True}}}}, "nodes.b.num_cpus is True; it must be a n"),
        (
            {"placement": "ray", "ray": {"nodes": {"b": {"resources": {"fast": "yes"}}}}},
            "nodes.b.resources.fast is 'yes'; it must be a number",
        ),
        ({"placement": "ray", "ray": {"nodes": {"b": {"num_cpus": 0}}}}, "ray.nodes.b reserves nothing"),
    ],
)
def test_mistakes(graph: StageGraph, deployment: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(graph, **deployment)
