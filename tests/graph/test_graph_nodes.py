"""Stages on several hosts: the connector that reaches from end to end, or an error that names the edge."""

from __future__ import annotations

from typing import Any

import pytest

from segue.connectors.base import Connector
from segue.connectors.create import Network, create
from segue.graph.deployment.deployment import REACH, Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.messages.addresses import Network as Keys
from segue.messages.addresses import endpoint, joined, node_of
from segue.messages.errors import ConfigError
from segue.orchestrator.orchestrator import Orchestrator

MACHINE = Hardware(8, 32 << 30)


def plan(graph: StageGraph, **deployment: Any) -> Plan:
    return load_plan(graph, deployment, hardware=MACHINE)


def kinds(made: Plan) -> dict[tuple[str, str], str]:
    return {(edge.source, edge.target): edge.kind for edge in made.edges}


def test_an_edge_gets_the_connector_that_reaches_its_ends(graph: StageGraph) -> None:
    made = plan(graph, stages={"talker": {"node": "b"}, "vocoder": {"node": "b"}})
    found = kinds(made)
    assert found["thinker", "talker"] == "tcp"
    assert found["talker", "vocoder"] == "shm"
    assert found["vocoder", "output"] == "tcp"
    assert found["encoder", "thinker"] == "shm"
    assert made.nodes() == ("b",)


def test_replicas_take_their_hosts_in_turn(graph: StageGraph) -> None:
    made = plan(graph, stages={"vocoder": {"node": ["server", "b"], "replicas": 3}})
    assert [made.stages["vocoder"].node_of(number) for number in range(3)] == ["server", "b", "server"]
    assert kinds(made)["talker", "vocoder"] == "tcp", "one of its ends may be elsewhere"
    assert plan(graph, stages={"vocoder": {"node": ["server", "b"]}}).stages["vocoder"].replicas == 2


@pytest.mark.parametrize(
    ("deployment", "field", "said"),
    [
        (
            {"stages": {"talker": {"node": "b"}}, "edges": [{"from": "thinker", "to": "talker", "connector": "shm"}]},
            "edges[0].connector",
            r"'thinker' and 'talker' are on different hosts \(b, server\); use a TcpConnector",
        ),
        ({"stages": {"talker": {"node": "a b"}}}, "stages.talker.node", "'a b'; it must be the name of a node"),
        ({"stages": {"talker": {"node": []}}}, "stages.talker.node", "the name of a node"),
        ({"stages": {"talker": {"node": ["b", "b"]}}}, "stages.talker.node", "each once"),
        (
            {"stages": {"talker": {"node": ["a", "b"], "replicas": 1}}},
            "stages.talker.replicas",
            r"at least 2, .* and of its nodes \(a, b\)",
        ),
        (
            {"edges": [{"from": "thinker", "to": "talker", "wire": "bfloat16"}]},
            "edges[0]",
            "stays on one host and loses nothing",
        ),
        (
            {"stages": {"talker": {"node": "b"}}, "edges": [{"from": "thinker", "to": "talker", "wire": "int8"}]},
            "edges[0].wire",
            "'int8'",
        ),
        (
            {"connectors": {"net": {"name": "TcpConnector", "extra": {"pool_bytes": "1MiB"}}}},
            None,
            "has no key 'pool_bytes'",
        ),
    ],
)
def test_mistakes_name_key_and_remedy(
    graph: StageGraph, deployment: dict[str, Any], field: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        plan(graph, **deployment)
    assert field is None or caught.value.field == field


def test_stages_of_one_worker_are_on_one_host(fused_graph: StageGraph) -> None:
    assert len(plan(fused_graph).group_of("thinker")) == 2
    apart = plan(fused_graph, stages={"encoder": {"node": "b"}, "thinker": {"node": "server"}})
    assert len(apart.group_of("thinker")) == 1


def test_a_deployment_with_nodes_needs_a_server_that_listens(graph: StageGraph) -> None:
    with pytest.raises(ConfigError, match=r"nodes \(b\), but the server listens for no other host: .* --listen"):
        Orchestrator(plan(graph, stages={"talker": {"node": "b"}}), sources={}, preload=[])


def test_plans_and_connectors_agree_on_reach() -> None:
    for kind, reach in REACH.items():
        if kind.startswith(("mooncake", "nixl")):  # they need their packages; their own tests look at them
            continue
        made: Connector = create(kind, f"reach-{kind}", {}, network=Network("127.0.0.1", bytes(32)))
        assert made.reach == reach
        made.close()


def test_a_tcp_connector_needs_a_network() -> None:
    with pytest.raises(ConfigError, match="--listen"):
        create("tcp", "", {})


def test_processes_of_one_node_use_its_own_endpoint() -> None:
    address = joined(Keys("b", "10.0.0.2", b"", b"", b""), "ipc:///run/w", "tcp://10.0.0.2:5000")
    assert endpoint(address, "b") == "ipc:///run/w"
    assert endpoint(address, "server") == "tcp://10.0.0.2:5000"
    assert (node_of(address), node_of("ipc:///run/w")) == ("b", "server")
    assert endpoint("ipc:///run/w", "server") == "ipc:///run/w"
