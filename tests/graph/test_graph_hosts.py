"""Each host has its own devices, memory and cores: as the deployment describes it, then as the host itself says."""

from __future__ import annotations

from typing import Any

import pytest

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.machine.account import account
from segue.graph.machine.hosts import stages_on
from segue.graph.render import as_text
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

GiB = 1 << 30
SERVER = Hardware(4, 32 * GiB)
NODES = {"big": {"cpus": 16, "memory": "64GiB", "gpus": ["24GiB", "24GiB"]}}


def plan(graph: StageGraph, hardware: Hardware = SERVER, **deployment: Any) -> Plan:
    return load_plan(graph, deployment, hardware=hardware)


def test_stages_get_the_devices_memory_and_cores_of_their_own_host(graph: StageGraph) -> None:
    stages = {"talker": {"node": "big"}, "vocoder": {"node": "big"}}
    made = plan(graph, nodes=NODES, stages=stages)
    assert made.stages["thinker"].devices == ("cpu",)
    assert [made.stages[name].devices for name in ("talker", "vocoder")] == [("cuda:0",), ("cuda:1",)]
    assert [made.stages[name].dtype for name in ("thinker", "talker")] == ["float32", "bfloat16"]
    assert made.stages["talker"].memory_share == 0.9, "it has the GPU to itself"
    assert made.stages["talker"].memory_bytes == int(0.9 * 24 * GiB)
    alone = plan(graph, nodes={"big": {"cpus": 16, "memory": 64 * GiB}}, stages={"vocoder": {"node": "big"}})
    assert (alone.stages["vocoder"].threads, alone.stages["vocoder"].memory_bytes) == (16, int(0.4 * 64 * GiB))
    here = plan(graph, stages={})
    assert here.stages["thinker"].threads < alone.stages["vocoder"].threads
    text = as_text(made)
    assert "node" in text.splitlines()[2].split()
    assert next(line.split()[-1] for line in text.splitlines() if " talker " in line) == "big"
    assert any(line.startswith("node big is to have 16 CPU cores, 64.0 GiB") for line in account(made))


def test_a_host_that_nobody_describes_is_taken_to_be_like_the_server(graph: StageGraph) -> None:
    made = plan(graph, stages={"vocoder": {"node": "b"}})
    assert (made.stages["vocoder"].devices, made.stages["vocoder"].threads) == (("cpu",), SERVER.cpus)


def test_replicas_on_several_hosts_have_what_all_of_them_have(graph: StageGraph) -> None:
    nodes = {"b": {"cpus": 2, "memory": "8GiB"}, "c": {"cpus": 8, "memory": "64GiB", "gpus": ["24GiB"]}}
    made = plan(graph, nodes=nodes, stages={"vocoder": {"node": ["b", "c"]}})
    assert made.stages["vocoder"].devices == ("cpu",)
    assert made.stages["vocoder"].threads == 2
    assert made.stages["vocoder"].memory_bytes == int(made.stages["vocoder"].memory_share * 8 * GiB)


def test_shares_add_up_on_each_host_by_itself(graph: StageGraph) -> None:
    shares = {"thinker": {"memory_share": 0.6}, "talker": {"memory_share": 0.6, "node": "b"}}
    assert plan(graph, stages=shares).stages["talker"].memory_share == 0.6
    both = {name: {**stage, "node": "b"} for name, stage in shares.items()}
    with pytest.raises(ConfigError, match=r"memory shares add up to 1.2 on cpu of node 'b', more than 1"):
        plan(graph, stages=both)


@pytest.mark.parametrize(
    ("deployment", "field", "said"),
    [
        ({"nodes": NODES}, "nodes.big", "'big', which is the node of no stage"),
        ({"nodes": {"big": {"cpus": 2}}}, "nodes.big", "needs cpus and memory"),
        ({"nodes": {"big": {**NODES["big"], "gpus": [True]}}}, "nodes.big.gpus", "a list of the GPUs' memory"),
        ({"nodes": {"big": {**NODES["big"], "cpu": 1}}}, "nodes.big.cpu", "no key 'cpu'; did you mean 'cpus'"),
        ({"nodes": {"server": NODES["big"]}}, None, "the host that `segue serve` runs on is looked at"),
        (
            {"nodes": NODES, "stages": {"talker": {"node": "big", "devices": "cuda:2"}}},
            "stages.talker.devices",
            r"names 'cuda:2', but node 'big' has 2 GPUs \(nodes.big\)",
        ),
        (
            {"stages": {"talker": {"node": "big", "devices": "cuda:0"}}},
            "stages.talker.devices",
            "this machine has no GPU, and nodes does not say that node 'big' has more",
        ),
    ],
)
def test_mistakes_about_hosts_are_named(
    graph: StageGraph, deployment: dict[str, Any], field: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        plan(graph, **deployment)
    assert field is None or caught.value.field == field


def test_a_host_that_joins_decides_with_what_it_has(graph: StageGraph) -> None:
    made = plan(graph, stages={"talker": {"node": "b", "threads": 3}, "vocoder": {"node": "b"}})
    found = stages_on(made, "b", Hardware(12, 8 * GiB))
    assert found.keys() == {"talker", "vocoder"}
    assert (found["talker"].threads, found["vocoder"].threads) == (3, 9), "what the file says stays"
    for name, stage in found.items():
        assert stage.memory_bytes == int(made.stages[name].memory_share * 8 * GiB)
    same = stages_on(made, "b", SERVER)
    assert same == {name: made.stages[name] for name in same}, "as planned, if it is like the server"


def test_a_host_that_lacks_a_device_of_a_stage_is_refused_by_name(graph: StageGraph) -> None:
    stages = {"talker": {"node": "big", "devices": ["cuda:0", "cuda:1"]}}
    made = plan(graph, nodes=NODES, stages=stages)
    assert stages_on(made, "big", Hardware(4, GiB, (GiB, 2 * GiB)))["talker"].memory_bytes == int(
        made.stages["talker"].memory_share * GiB
    )
    with pytest.raises(ConfigError, match="stage 'talker' is on cuda:1 of node 'big', which has 1 GPU: ") as caught:
        stages_on(made, "big", Hardware(4, GiB, (GiB,)))
    assert caught.value.field == "stages.talker.devices"
    with pytest.raises(ConfigError, match=r"no GPU that can be used \(its driver hangs\)"):
        stages_on(made, "big", Hardware(4, GiB, gpu_notes=("its driver hangs",)))


def test_replicas_need_only_the_devices_of_their_own_places(graph: StageGraph) -> None:
    nodes = dict.fromkeys(("b", "c"), NODES["big"])
    made = plan(graph, nodes=nodes, stages={"talker": {"node": ["b", "c"], "devices": ["cuda:0", "cuda:1"]}})
    assert stages_on(made, "b", Hardware(4, GiB, (GiB,))).keys() == {"talker"}, "its only replica is on cuda:0"
