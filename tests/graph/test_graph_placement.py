"""Devices, memory, threads and shared workers: what the file says, and what is worked out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import BUILT_IN, StageGraph
from segue.messages.errors import ConfigError

Lay = Callable[..., Plan]
GiB = 1 << 30


def test_a_machine_without_a_gpu(graph: StageGraph, laptop: Hardware) -> None:
    plan = load_plan(graph, hardware=laptop)
    assert {stage.devices for stage in plan.stages.values()} == {("cpu",)}
    assert {stage.dtype for stage in plan.stages.values()} == {"float32"}
    assert {stage.threads for stage in plan.stages.values()} == {1}, "six workers on two cores"
    assert plan.stages["thinker"].max_tokens_per_step == 512
    assert len(plan.groups) == 6
    assert plan.stages["input"].memory_share == plan.stages["output"].memory_share == 0


def test_one_worker_has_all_cores(graph: StageGraph) -> None:
    plan = load_plan(graph, {"defaults": {"fuse_with": "thinker"}}, hardware=Hardware(8, GiB))
    assert plan.groups == (("input",), ("encoder", "thinker", "talker", "vocoder"), ("output",))
    assert plan.stages["talker"].threads == 7, "the cores but the input's, by weight"
    assert {edge.kind for edge in plan.edges if edge.source != "input" and edge.target != "output"} == {"inproc"}


def test_a_machine_with_gpus(graph: StageGraph, two_gpus: Hardware) -> None:
    plan = load_plan(graph, hardware=two_gpus)
    assert {name: stage.devices[0] for name, stage in plan.stages.items()} == {
        "input": "cpu",
        "encoder": "cuda:0",
        "thinker": "cuda:1",
        "talker": "cuda:0",
        "vocoder": "cuda:0",
        "output": "cpu",
    }
    assert plan.stages["thinker"].dtype == "bfloat16"
    assert plan.stages["thinker"].memory_share == 0.9
    assert plan.stages["thinker"].max_tokens_per_step == 2048


@given(
    cpus=st.integers(1, 64),
    gpus=st.lists(st.integers(1, 200), max_size=4),
    fuse=st.booleans(),
    replicas=st.integers(1, 3),
)
def test_defaults_fit_any_machine(
    make_graph: Callable[..., StageGraph], cpus: int, gpus: list[int], fuse: bool, replicas: int
) -> None:
    hardware = Hardware(cpus, 64 * GiB, tuple(size * GiB for size in gpus))
    plan = load_plan(make_graph(fuse=fuse), {"defaults": {"replicas": replicas}}, hardware=hardware)
    used: dict[str, float] = {}
    for stage in plan.stages.values():
        for replica in range(stage.replicas):
            device = stage.device_of(replica)
            used[device] = used.get(device, 0.0) + stage.memory_share
        assert stage.memory_share > 0 or stage.name in BUILT_IN
        assert (stage.devices == ("cpu",)) == (not gpus or stage.name in BUILT_IN)
    assert all(share <= 0.9 + 1e-9 for share in used.values())
    # several workers of the input stage are there for files that take long: they share a core; encoding takes little
    counts = {"input": 1, "output": 0}
    once = {group: counts.get(group[0], plan.stages[group[0]].replicas) for group in plan.groups}
    workers = [plan.stages[group[0]] for group, count in once.items() for _ in range(count)]
    assert all(worker.threads >= 1 for worker in workers)
    assert sum(worker.threads for worker in workers) <= max(cpus, len(workers)), "cores are not oversubscribed"


def test_what_the_file_takes_is_not_given_twice(plan: Lay) -> None:
    laid = plan({"stages": {"thinker": {"devices": "cuda:0", "memory_share": 0.5, "threads": 10}}})
    assert laid.stages["thinker"].memory_bytes == 40 * GiB
    others = [stage for name, stage in laid.stages.items() if name not in ("thinker", "input")]
    assert sum(stage.memory_share for stage in others if stage.devices == ("cuda:0",)) <= 0.4
    assert sum(stage.threads for name, stage in laid.stages.items() if name != "output") <= 16


def test_a_denoiser_has_all_the_cores(laptop: Hardware) -> None:
    graph = StageGraph("pictures")
    graph.stage("text_encoder", "module", takes={"text"})
    graph.stage("denoiser", "diffusion")
    graph.stage("decoder", "module", gives={"image"})
    graph.edge("text_encoder", "denoiser")
    graph.edge("denoiser", "decoder")
    plan = load_plan(graph, None, hardware=laptop)
    assert {name: stage.threads for name, stage in plan.stages.items()} == {
        "input": 1,
        "text_encoder": 1,
        "denoiser": laptop.cpus,
        "decoder": 1,
        "output": 1,
    }


def test_more_threads_than_cores_if_the_file_says_so(graph: StageGraph, laptop: Hardware) -> None:
    plan = load_plan(graph, {"defaults": {"threads": 2}}, hardware=laptop)
    assert [stage.threads for stage in plan.stages.values()] == [1, 2, 2, 2, 2, 1]


def test_little_is_left(graph: StageGraph) -> None:
    one = Hardware(2, GiB, (GiB,))
    plan = load_plan(graph, {"stages": {"thinker": {"memory_share": 0.92}}}, hardware=one)
    assert 0.92 + sum(plan.stages[name].memory_share for name in ("encoder", "talker", "vocoder")) <= 1
    with pytest.raises(ConfigError, match=r"leave nothing of cuda:0 for 'encoder': they add up to 1; lower them"):
        load_plan(graph, {"stages": {"thinker": {"memory_share": 1.0}}}, hardware=one)


def test_one_replica_per_device(plan: Lay) -> None:
    laid = plan({"stages": {"talker": {"devices": ["cuda:1", "cuda:0"]}}})
    assert laid.stages["talker"].replicas == 2
    assert laid.stages["talker"].device_of(0) == "cuda:1"


def test_memory_of_a_gpu_that_does_not_tell(graph: StageGraph) -> None:
    plan = load_plan(graph, hardware=Hardware(4, GiB, (0,)))
    assert plan.stages["thinker"].memory_share > 0
    assert plan.stages["thinker"].memory_bytes == 0


def test_a_suggestion_is_followed(fused_graph: StageGraph, two_gpus: Hardware) -> None:
    plan = load_plan(fused_graph, hardware=two_gpus)
    assert plan.group_of("encoder") == ("encoder", "thinker")
    assert plan.stages["encoder"].devices == plan.stages["thinker"].devices
    assert plan.stages["encoder"].threads == plan.stages["thinker"].threads
    assert plan.edge("encoder", "thinker").connector == "inproc"


@pytest.mark.parametrize(
    "against",
    [
        {"stages": {"encoder": {"fuse_with": None}}},
        {"stages": {"encoder": {"devices": "cuda:0"}, "thinker": {"devices": "cuda:1"}}},
        {"stages": {"encoder": {"replicas": 2}, "thinker": {"replicas": 1}}},
        {"stages": {"encoder": {"threads": 2}, "thinker": {"threads": 1}}},
        {"edges": [{"from": "encoder", "to": "thinker", "connector": "shm"}]},
    ],
)
def test_a_suggestion_gives_way_to_the_file(
    fused_graph: StageGraph, two_gpus: Hardware, against: dict[str, Any]
) -> None:
    plan = load_plan(fused_graph, against, hardware=two_gpus)
    assert plan.group_of("encoder") == ("encoder",)
    assert plan.edge("encoder", "thinker").kind == "shm"


@pytest.mark.parametrize(
    ("against", "field", "message"),
    [
        ({"stages": {"drawer": {"fuse_with": None}}}, "fuse_with", "leave out fuse_with of the stage"),
        (
            {"stages": {"drawer": {"devices": "cuda:0"}, "reader": {"devices": "cuda:1"}}},
            "devices",
            "'drawer' has devices cuda:0 and 'reader' has cuda:1: give both the same",
        ),
        ({"edges": [{"from": "reader", "to": "drawer", "connector": "shm"}]}, "fuse_with", "connector of their edge"),
    ],
)
def test_stages_that_share_weights_are_never_set_apart(
    two_gpus: Hardware, against: dict[str, Any], field: str, message: str
) -> None:
    graph = StageGraph("drawing")
    graph.stage("reader", "autoregressive", takes={"text"})
    graph.stage("drawer", "diffusion", gives={"image"}, shares_with="reader")
    graph.edge("reader", "drawer")
    laid = load_plan(graph, {}, hardware=two_gpus)
    assert laid.group_of("drawer") == ("reader", "drawer")
    with pytest.raises(ConfigError, match=f"uses the weights and the cache of stage 'reader'.*{message}") as refused:
        load_plan(graph, against, hardware=two_gpus)
    assert refused.value.field == f"stages.drawer.{field}"


def test_fusing_is_transitive_and_shares_what_one_says(plan: Lay) -> None:
    laid = plan(
        {"stages": {"vocoder": {"fuse_with": "talker"}, "talker": {"fuse_with": "thinker", "devices": "cuda:1"}}}
    )
    assert laid.group_of("vocoder") == ("thinker", "talker", "vocoder")
    assert laid.stages["thinker"].devices == ("cuda:1",)


def test_what_is_fused_with_the_input_runs_on_the_cpu(plan: Lay) -> None:
    laid = plan({"stages": {"input": {"fuse_with": "encoder", "devices": "cpu"}}})
    assert laid.stages["encoder"].devices == ("cpu",)
    assert laid.stages["encoder"].dtype == "float32"


def stages(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"stages": sections}


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        (stages(talker={"fuse_with": "thinkr"}), r"stages.talker.fuse_with is 'thinkr', .*did you mean 'thinker'\?"),
        (stages(talker={"fuse_with": "talker"}), "stages.talker.fuse_with is 'talker'; it must be another stage"),
        (stages(talker={"fuse_with": ["thinker"]}), "stages.talker.fuse_with is .* must be the name of a stage"),
        (
            stages(talker={"fuse_with": "thinker", "devices": "cuda:0"}, thinker={"devices": "cuda:1"}),
            "stages.talker.fuse_with is 'thinker', but 'talker' has devices cuda:0 and 'thinker' has cuda:1",
        ),
        (
            stages(talker={"fuse_with": "thinker", "replicas": 2}, thinker={"replicas": 1}),
            "'talker' has replicas 2 and 'thinker' has 1; fused stages share a worker",
        ),
        (
            stages(encoder={"fuse_with": "input", "devices": "cuda:0"}),
            "'encoder' has devices cuda:0 and 'input' has cpu",
        ),
        (
            stages(thinker={"devices": "cuda:7"}),
            r"thinker.devices names 'cuda:7', but this machine has 2 GPUs; did you",
        ),
        (stages(thinker={"devices": "cuda"}), "stages.thinker.devices names 'cuda'"),
        (stages(thinker={"devices": []}), r"stages.thinker.devices is \[\]; it must be 'auto', 'cpu', 'cuda:N'"),
        (stages(thinker={"devices": 0}), "stages.thinker.devices is 0; it must be"),
        (stages(thinker={"devices": ["cpu", "cuda:0"]}), "stages.thinker.devices is .* of one kind, each once"),
        (stages(thinker={"devices": ["cuda:0", "cuda:0"]}), "stages.thinker.devices is .*, each once"),
        (stages(input={"devices": "cuda:0"}), "stages.input.devices is 'cuda:0'; it must be cpu: the input stage runs"),
        (
            stages(thinker={"devices": ["cuda:0", "cuda:1"], "replicas": 1}),
            r"stages.thinker.replicas is 1; it must be at least 2, the number of its devices \(cuda:0, cuda:1\)",
        ),
        (
            stages(
                thinker={"devices": "cuda:0", "memory_share": 0.7}, talker={"devices": "cuda:0", "memory_share": 0.5}
            ),
            r"add up to 1.2 on cuda:0, more than 1: stages.thinker.memory_share \(thinker\) 0.7, stages.talker",
        ),
        (
            {
                "defaults": {"devices": "cuda:0"},
                "stages": {"thinker": {"memory_share": 0.6, "replicas": 2}},
            },
            r"add up to 1.2 on cuda:0, .*\(thinker\) 0.6 x 2 replicas",
        ),
    ],
)
def test_mistake(plan: Lay, deployment: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(deployment)
    assert caught.value.field is not None


def test_a_gpu_where_there_is_none(graph: StageGraph, laptop: Hardware) -> None:
    with pytest.raises(ConfigError, match="names 'cuda:0', but this machine has no GPU; known: cpu"):
        load_plan(graph, stages(thinker={"devices": "cuda:0"}), hardware=laptop)
