"""Connectors of edges: given, worked out, refused; and the spelling of vllm-omni's documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

Lay = Callable[..., Plan]


def qwen() -> StageGraph:
    """Three stages, as vllm-omni counts them for Qwen2.5-Omni."""
    graph = StageGraph("qwen2_5_omni")
    graph.stage("thinker", "autoregressive", takes={"text", "image", "audio", "video"}, gives={"text"})
    graph.stage("talker", "autoregressive")
    graph.stage("vocoder", "module", gives={"audio"})
    graph.edge("thinker", "talker")
    graph.edge("talker", "vocoder")
    return graph


# vllm-omni, docs/design/feature/disaggregated_inference.md and omni_connectors/shared_memory_connector.md, in the form
# published with 0.12: connectors under `runtime`, stages under `stage_args`
STAGE_ARGS = """
runtime:
  connectors:
    connector_of_shared_memory:
      name: SharedMemoryConnector
      extra:
        shm_threshold_bytes: 1024
stage_args:
  - stage_id: 0
    output_connectors:
      to_stage_1: connector_of_shared_memory
  - stage_id: 1
    input_connectors:
      from_stage_0: connector_of_shared_memory
"""

# the same pages later: `connectors` at the top, a list of `stages`
STAGE_LIST = """
connectors:
  connector_of_shared_memory:
    name: SharedMemoryConnector
    extra: {shm_threshold_bytes: 1024}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: connector_of_shared_memory}}
  - {stage_id: 1, input_connectors: {from_stage_0: connector_of_shared_memory}}
"""

NAMED = """
runtime: {connectors: {connector_of_shared_memory: {name: SharedMemoryConnector, extra: {shm_threshold_bytes: 1024}}}}
stage_args:
  - stage_name: thinker
    max_batch: 9
    output_connectors: {to_stage_talker: connector_of_shared_memory}
  - {stage_name: talker, stage_id: 1}
"""


@pytest.mark.parametrize("text", [STAGE_ARGS, STAGE_LIST, NAMED])
def test_the_examples_of_vllm_omni_load(text: str, laptop: Hardware) -> None:
    plan = load_plan(qwen(), yaml.safe_load(text), hardware=laptop)
    edge = plan.edge("thinker", "talker")
    assert (edge.connector, edge.kind, edge.extra) == (
        "connector_of_shared_memory",
        "shm",
        {"shm_threshold_bytes": 1024},
    )
    # the documentation's "auto mode": the one connector defined serves the other edges as well
    assert plan.edge("talker", "vocoder").connector == "connector_of_shared_memory"
    assert plan.stages["thinker"].max_batch == (9 if text == NAMED else 64)


# vllm-omni, docs/design/feature/omni_connectors/mooncake_store_connector.md and mooncake_transfer_engine_connector.md
STORE = """
connectors:
  connector_of_mooncake:
    name: MooncakeStoreConnector
    extra:
      host: "127.0.0.1"
      metadata_server: "http://10.0.0.1:8080/metadata"
      master: "10.0.0.1:50051"
      segment: 512000000
      localbuf: 64000000
      proto: "tcp"
stages:
  - stage_id: 0
    output_connectors:
      to_stage_1: connector_of_mooncake
  - stage_id: 1
    input_connectors:
      from_stage_0: connector_of_mooncake
"""
ENGINE = """
connectors:
  rdma_connector:
    name: MooncakeTransferEngineConnector
    extra:
      host: "auto"
      zmq_port: 50051
      protocol: "rdma"
      device_name: ""
      memory_pool_size: 4294967296
      memory_pool_device: "cpu"
stages:
  - stage_id: 0
    output_connectors:
      to_stage_1: rdma_connector
"""


def test_its_mooncake_connectors_load(laptop: Hardware) -> None:
    store = load_plan(qwen(), yaml.safe_load(STORE), hardware=laptop)
    edge = store.edge("thinker", "talker")
    assert (edge.connector, edge.kind) == ("connector_of_mooncake", "mooncake_store")
    assert edge.extra == yaml.safe_load(STORE)["connectors"]["connector_of_mooncake"]["extra"]
    assert store.edge("talker", "vocoder").kind == "shm", "an edge that names none stays on its host"
    edge = load_plan(qwen(), yaml.safe_load(ENGINE), hardware=laptop).edge("thinker", "talker")
    assert edge.kind == "mooncake_engine"
    assert edge.extra == {"host": "auto", "protocol": "rdma", "device_name": "", "max_bytes": 1 << 32}
    # an older name of the store's
    older = load_plan(qwen(), yaml.safe_load(STORE.replace("StoreC", "C")), hardware=laptop)
    assert older.edge("thinker", "talker").kind == "mooncake_store"


# its older pages: the window, edges and sources of stages that the graph has anyway
RUNTIME = """
runtime:
  enabled: true
  defaults: {window_size: -1, max_inflight: 1}
  connectors:
    connector_of_mooncake:
      name: MooncakeConnector
      extra: {host: "127.0.0.1", metadata_server: "http://10.0.0.1:8080/metadata", master: "10.0.0.1:50051",
              segment: 512000000, localbuf: 64000000, proto: tcp}
  edges:
    - {from: 0, to: 1, window_size: -1}
    - {from: 1, to: 2}
stage_args:
  - {stage_id: 0, output_connectors: {to_stage_1: connector_of_mooncake}}
  - {stage_id: 1, engine_input_source: [0], input_connectors: {from_stage_0: connector_of_mooncake}}
  - {stage_id: 2, engine_input_source: [1]}
"""


def test_its_runtime_section_loads(laptop: Hardware) -> None:
    plan = load_plan(qwen(), yaml.safe_load(RUNTIME), hardware=laptop)
    assert plan.edge("thinker", "talker").kind == "mooncake_store"
    assert plan.edge("talker", "vocoder").kind == "shm"


def test_a_mooncake_edge_may_join_hosts(laptop: Hardware) -> None:
    made = load_plan(
        qwen(), yaml.safe_load(STORE.replace("- stage_id: 1", "- stage_id: 1\n    node: b")), hardware=laptop
    )
    assert made.edge("thinker", "talker").kind == "mooncake_store"
    assert made.edge("talker", "vocoder").kind == "tcp"


def test_numbers_are_places_in_the_graph(plan: Lay) -> None:
    laid = plan({"stage_args": [{"stage_id": 0, "max_batch": 3}, {"stage_id": "3", "max_batch": 4}]})
    assert laid.stages["encoder"].max_batch == 3
    assert laid.stages["vocoder"].max_batch == 4
    assert plan({"edges": [{"from": 1, "to": 2, "budget": 5000}]}).edge("thinker", "talker").budget == 5000


def test_an_edge_and_a_stage_may_say_their_part(plan: Lay) -> None:
    laid = plan(
        {
            "edges": [{"from": "thinker", "to": "talker", "budget": 4096, "start": 3}],
            "stages": {"talker": {"input_connectors": {"from_stage_thinker": "mine"}}},
            "runtime": {
                "connectors": {"mine": {"name": "SharedMemoryConnector"}, "shm": {"name": "SharedMemoryConnector"}}
            },
        }
    )
    edge = laid.edge("thinker", "talker")
    assert (edge.connector, edge.budget, edge.start) == ("mine", 4096, 3)
    assert (laid.edge("talker", "vocoder").connector, laid.edge("talker", "vocoder").start) == ("shm", 1)


def test_the_start_of_an_edge_cannot_keep_another_from_going_on(laptop: Hardware) -> None:
    graph = StageGraph("diamond")
    for name in ("a", "b", "c", "d"):
        graph.stage(name, "module", takes={"text"} if name == "a" else set(), gives={"text"} if name == "d" else set())
    for source, target in ("ab", "bc", "cd", "ad"):
        graph.edge(source, target)
    for source, target in ("ab", "bc", "cd", "ad"):
        with pytest.raises(ConfigError, match=f"edge {source} -> {target} cannot have a start: 'd' also gets chunks"):
            load_plan(graph, {"edges": [{"from": source, "to": target, "start": 2}]}, hardware=laptop)


def test_a_named_connector_in_process(plan: Lay) -> None:
    laid = plan(
        {
            "stages": {"vocoder": {"fuse_with": "talker"}},
            "edges": [{"from": "talker", "to": "vocoder", "connector": "direct"}],
            "connectors": {"direct": {"name": "InProcessConnector"}},
        }
    )
    assert (laid.edge("talker", "vocoder").connector, laid.edge("talker", "vocoder").kind) == ("direct", "inproc")


def connector(**keys: Any) -> dict[str, Any]:
    return {"runtime": {"connectors": {"c": keys}}}


def edge(**keys: Any) -> dict[str, Any]:
    return {"edges": [{"from": "thinker", "to": "talker", **keys}]}


SHM = {"name": "SharedMemoryConnector"}


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ({"runtime": {"conectors": {}}}, r"runtime has no key 'conectors'; did you mean 'connectors'\?"),
        ({"runtime": {"enabled": False}}, "runtime.enabled is False; only True is understood"),
        ({"runtime": {"defaults": {"max_inflight": 4}}}, "runtime.defaults.max_inflight is 4; .* `budget` of an edge"),
        ({"runtime": {"edges": [{"from": 0, "to": 2}]}}, r"runtime.edges\[0\] is encoder -> talker, which is no edge"),
        ({"runtime": {"edges": [{"from": 0, "to": 1, "window_size": 8}]}}, "window_size is 8; only -1 is understood"),
        (
            {"stage_args": [{"stage_id": 3, "engine_input_source": [0]}]},
            r"stage_args\[0\].engine_input_source\[0\] is encoder -> vocoder, which is no edge",
        ),
        ({"stage_args": [{"stage_id": 0, "final_output": True}]}, "'final_output'; write nothing .the graph of the mo"),
        ({"stage_args": [{"stage_id": 0, "runtime": {}}]}, "no key 'runtime'; write devices, max_batch instead"),
        (connector(), "runtime.connectors.c.name is None; it must be one of SharedMemoryConnector, InProcessConnector"),
        (connector(name="SharedMemoryConector"), r"did you mean 'SharedMemoryConnector'\?"),
        (connector(name="YuanrongConnector"), "c.name is 'YuanrongConnector', which this version does not have"),
        (connector(name="CudaIpcConnector"), "served by SharedMemoryConnector"),
        (
            connector(name="MooncakeStoreConnector", extra={"matser": "10.0.0.1:50051"}),
            r"c.extra has no key 'matser'; did you mean 'master'\?",
        ),
        (connector(name="MooncakeStoreConnector", extra={"master": 50051}), "c.extra.master is 50051; it must be text"),
        (
            connector(name="MooncakeTransferEngineConnector", extra={"memory_pool_device": "cuda"}),
            "extra.memory_pool_device is 'cuda'; it must be cpu",
        ),
        (connector(**SHM, extras={}), r"connectors.c has no key 'extras'; did you mean 'extra'\?"),
        (
            connector(**SHM, extra={"shm_threshold": 1}),
            r"c.extra has no key 'shm_threshold'; did you mean 'shm_threshold_b",
        ),
        (
            connector(**SHM, extra={"cuda_pool_bytes": "5iB"}),
            "extra.cuda_pool_bytes is '5iB'; it must be a size of at least 0",
        ),
        (
            connector(**SHM, extra={"max_bytes": "few"}),
            "runtime.connectors.c.extra.max_bytes is 'few'; it must be a size",
        ),
        (
            connector(**SHM, extra={"pool_bytes": 100}),
            "extra.pool_bytes is 100; it must be a size of at least 4096 bytes",
        ),
        (
            connector(**SHM, extra={"shm_threshold_bytes": -1}),
            "shm_threshold_bytes is -1; it must be a size of at least 0",
        ),
        (
            connector(**SHM, extra={"pool_bytes": "2MiB", "max_bytes": "1MiB"}),
            r"extra.max_bytes is 1048576; it must be at least pool_bytes \(2097152\)",
        ),
        (connector(name="InProcessConnector", extra={"pool_bytes": 1}), "connectors.c.extra has no key 'pool_bytes'"),
        (
            {**connector(**SHM), "connectors": {"c": SHM}},
            "connectors.c is defined twice; the other is runtime.connectors.c",
        ),
        (edge(connector="smh"), r"edges\[0\].connector is 'smh', which is no connector; did you mean 'shm'\?"),
        (edge(connector=3), r"edges\[0\].connector is 3; it must be the name of a connector"),
        (edge(connector="inproc"), r"edges\[0\].connector is 'inproc': 'thinker' and 'talker' are different processes"),
        (
            {**edge(connector="shm"), "stages": {"talker": {"fuse_with": "thinker"}}},
            r"edges\[0\].connector is 'shm': 'thinker' and 'talker' share a worker, so only an InProcessConnector",
        ),
        (edge(budjet=1), r"edges\[0\] has no key 'budjet'; did you mean 'budget'\?"),
        (edge(budget="lots"), r"edges\[0\].budget is 'lots'; it must be a size"),
        (edge(to=None), r"edges\[0\] has no 'to'; an edge needs from and to"),
        (edge(to="talkr"), r"edges\[0\].to is 'talkr', which is no stage of 'omni'; did you mean 'talker'\?"),
        (
            edge(to=9),
            r"edges\[0\].to is 9; it must be a stage: 0 \(encoder\), 1 \(thinker\), 2 \(talker\), 3 \(vocoder\)",
        ),
        (edge(to=True), r"edges\[0\].to is True; it must be a stage"),
        (
            edge(to="vocoder"),
            r"edges\[0\] is thinker -> vocoder, which is no edge of 'omni'; did you mean 'talker -> vocoder'",
        ),
        ({"edges": {"from": 0}}, "edges is {'from': 0}; it must be a list"),
        ({"edges": edge()["edges"] * 2}, r"edges\[1\]: edge thinker -> talker is in the list twice"),
        ({"stage_args": [{"max_batch": 1}]}, r"stage_args\[0\] names no stage; it needs stage_name or stage_id"),
        ({"stage_args": [{"stage_id": 9}]}, r"stage_args\[0\].stage_id is 9; it must be a stage: 0 \(encoder\)"),
        ({"stage_args": [{"stage_id": -1}]}, r"stage_args\[0\].stage_id is -1; it must be a stage"),
        ({"stage_args": [{"stage_name": "tinker"}]}, r"stage_name is 'tinker', .*did you mean 'thinker'\?"),
        (
            {"stage_args": [{"stage_name": "thinker", "stage_id": 2}]},
            r"stage_args\[0\].stage_id is 2, which is 'talker', but stage_name is 'thinker'",
        ),
        (
            {"stage_args": [{"stage_id": 0}, {"stage_id": 0}]},
            r"stage_args\[1\] is stage 'encoder', as is stage_args\[0\]",
        ),
        ({"stage_args": [{"stage_id": 0, "engine_args": {}}]}, "no key 'engine_args'; write the keys of a stage"),
        (
            {"stage_args": [{"stage_id": 1, "output_connectors": {"stage_2": "shm"}}]},
            r"output_connectors.stage_2: keys of output_connectors must look like to_stage_<stage>",
        ),
        (
            {"stage_args": [{"stage_id": 1, "output_connectors": {"to_stage_2": 7}}]},
            r"stage_args\[0\].output_connectors.to_stage_2 is 7; it must be the name of a connector",
        ),
        (
            {"stage_args": [{"stage_id": 1, "output_connectors": {"to_stage_3": "shm"}}]},
            "to_stage_3 is thinker -> vocoder, which is no edge",
        ),
        (
            {
                "connectors": {"a": SHM, "b": SHM},
                "stage_args": [
                    {"stage_id": 1, "output_connectors": {"to_stage_2": "a"}},
                    {"stage_id": 2, "input_connectors": {"from_stage_1": "b"}},
                ],
            },
            r"stage_args\[1\].input_connectors.from_stage_1 is 'b', but stage_args\[0\].output_connectors.to_stage",
        ),
        (
            {"connectors": {"shm": {"name": "InProcessConnector"}}},
            "edge input -> encoder is 'shm': 'input' and 'encoder' are different processes; use a Shared",
        ),
    ],
)
def test_mistake(plan: Lay, deployment: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(deployment)
    assert caught.value.field is not None
