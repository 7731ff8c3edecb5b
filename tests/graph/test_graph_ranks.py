"""Tensor parallel stages: how many devices a replica takes, what each process gets, and what is refused."""

from __future__ import annotations

import pytest

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan, stage_overrides
from segue.graph.deployment.options import LoraPlan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError

GiB = 1 << 30
FOUR = Hardware(16, 64 * GiB, (80 * GiB,) * 4)
LAPTOP = Hardware(4, 8 * GiB)


@pytest.fixture
def lm() -> StageGraph:
    graph = StageGraph("lm")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, divisible=True)
    return graph


def test_a_device_for_each_rank(lm: StageGraph) -> None:
    llm = load_plan(lm, {"stages": {"llm": {"tensor_parallel": 2}}}, hardware=FOUR).stages["llm"]
    assert (llm.devices, llm.replicas, llm.tensor_parallel) == (("cuda:0", "cuda:1"), 1, 2)
    assert llm.memory_bytes == pytest.approx(0.9 * 80 * GiB)
    devices = {"tensor_parallel": 2, "devices": [f"cuda:{number}" for number in (3, 1, 0, 2)]}
    llm = load_plan(lm, {"stages": {"llm": devices}}, hardware=FOUR).stages["llm"]
    assert llm.replicas == 2
    assert [[llm.device_of(replica, rank) for rank in range(2)] for replica in range(2)] == [
        ["cuda:3", "cuda:1"],
        ["cuda:0", "cuda:2"],
    ]


def test_on_a_cpu_ranks_share_what_a_replica_has(lm: StageGraph) -> None:
    one = load_plan(lm, hardware=LAPTOP).stages["llm"]
    two = load_plan(lm, hardware=LAPTOP, overrides=stage_overrides(None, tensor_parallel=2)).stages["llm"]
    assert (two.devices, two.replicas, two.threads, two.memory_share) == (("cpu",), 1, one.threads, one.memory_share)
    assert two.memory_bytes == one.memory_bytes // 2


def test_the_file_wins_over_the_caller(lm: StageGraph) -> None:
    overrides = stage_overrides(None, tensor_parallel=2)
    file = {"stages": {"llm": {"tensor_parallel": 1}}}
    assert load_plan(lm, file, hardware=LAPTOP, overrides=overrides).stages["llm"].tensor_parallel == 1
    assert load_plan(lm, hardware=LAPTOP, overrides=overrides).stages["input"].ranks == 1


@pytest.mark.parametrize(
    ("llm", "message"),
    [
        ({"tensor_parallel": 0}, r"stages\.llm\.tensor_parallel is 0; it must be an integer of at least 1"),
        ({"tensor_parallel": 8}, r"tensor_parallel is 8, but the stage has 4 GPUs"),
        ({"tensor_parallel": 2, "devices": ["cuda:0", "cuda:1", "cuda:2"]}, "is 2, but the stage has 3 GPUs"),
        (
            {"tensor_parallel": 2, "devices": ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "replicas": 1},
            r"replicas is 1; it must be at least 2, .*, 2 for each",
        ),
        ({"tensor_parallel": 2, "replicas": 2, "memory_share": 0.6}, "add up to 1.2 on cuda:0"),
        ({"tensor_parallel_size": 2}, "write tensor_parallel instead"),
    ],
)
def test_refused(lm: StageGraph, llm: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(lm, {"stages": {"llm": llm}}, hardware=FOUR)


def test_a_stage_that_cannot_be_divided(graph: StageGraph) -> None:
    file = {"stages": {"thinker": {"tensor_parallel": 2}}}
    with pytest.raises(ConfigError, match=r"stages\.thinker\.tensor_parallel is 2, but the weights of stage 'thinker'"):
        load_plan(graph, file, hardware=LAPTOP)
    with pytest.raises(ConfigError, match=r"tensor_parallel is 2, but the weights of stage 'thinker'"):
        load_plan(graph, hardware=LAPTOP, overrides=stage_overrides(None, tensor_parallel=2))


def test_a_divided_stage_has_its_worker_to_itself() -> None:
    graph = StageGraph("two")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, divisible=True)
    graph.stage("vocoder", "module", gives={"audio"})
    graph.edge("llm", "vocoder")
    file = {"stages": {"llm": {"tensor_parallel": 2}, "vocoder": {"fuse_with": "llm"}}}
    with pytest.raises(ConfigError, match="share a worker"):
        load_plan(graph, file, hardware=LAPTOP)


def test_what_a_divided_stage_can_and_cannot_have(lm: StageGraph) -> None:
    fewer_bits = {"tensor_parallel": 2, "quantization": "int8", "kv_dtype": "fp8"}
    stage = load_plan(lm, {"stages": {"llm": fewer_bits}}, hardware=LAPTOP).stages["llm"]
    assert (stage.tensor_parallel, stage.quantization, stage.kv_dtype) == (2, "int8", "fp8")
    adapted = load_plan(lm, {"stages": {"llm": {"tensor_parallel": 2, "lora": {}}}}, hardware=LAPTOP).stages["llm"]
    assert (adapted.tensor_parallel, adapted.lora) == (2, LoraPlan())


def test_guidance_branches_of_a_denoiser_on_processes_of_their_own() -> None:
    graph = StageGraph("pictures")
    graph.stage("denoiser", "diffusion", takes={"text"}, gives={"image"})
    said = {"defaults": {"tensor_parallel": 4}, "stages": {"denoiser": {"cfg_parallel": 2}}}
    denoiser = load_plan(graph, said, hardware=FOUR).stages["denoiser"]
    assert (denoiser.devices, denoiser.replicas, denoiser.ranks) == (("cuda:0", "cuda:1"), 1, 2)
    assert (denoiser.tensor_parallel, denoiser.device_of(0, 1)) == (1, "cuda:1")
    three = {"stages": {"denoiser": {"cfg_parallel": 2, "devices": ["cuda:0", "cuda:1", "cuda:2"]}}}
    with pytest.raises(ConfigError, match=r"stages.denoiser.cfg_parallel is 2, but the stage has 3 GPUs"):
        load_plan(graph, three, hardware=FOUR)


def test_a_language_model_has_no_guidance_branches(lm: StageGraph) -> None:
    with pytest.raises(ConfigError, match=r"stages.llm.cfg_parallel is for diffusion stages"):
        load_plan(lm, {"stages": {"llm": {"cfg_parallel": 2}}}, hardware=LAPTOP)
    assert load_plan(lm, {"defaults": {"cfg_parallel": 2}}, hardware=LAPTOP).stages["llm"].ranks == 1


@pytest.fixture
def images() -> StageGraph:
    graph = StageGraph("pictures")
    graph.stage("denoiser", "diffusion", takes={"text"}, gives={"image"})
    return graph


@pytest.mark.parametrize("way", ["cfg_parallel", "sequence_parallel", "tensor_parallel"])
def test_a_denoiser_has_several_processes(images: StageGraph, way: str) -> None:
    said: dict[str, object] = {way: 2}
    denoiser = load_plan(images, {"stages": {"denoiser": said}}, hardware=FOUR).stages["denoiser"]
    ways = (denoiser.cfg_parallel, denoiser.sequence_parallel, denoiser.tensor_parallel)
    assert (sorted(ways), getattr(denoiser, way), denoiser.ranks) == ([1, 1, 2], 2, 2)
    assert (denoiser.devices, denoiser.replicas, denoiser.device_of(0, 1)) == (("cuda:0", "cuda:1"), 1, "cuda:1")
    four = {"stages": {"denoiser": {way: 3, "devices": [f"cuda:{number}" for number in range(4)]}}}
    with pytest.raises(ConfigError, match=rf"stages.denoiser.{way} is 3, but the stage has 4 GPUs"):
        load_plan(images, four, hardware=FOUR)
    adapted = load_plan(images, {"stages": {"denoiser": {way: 2, "lora": {}}}}, hardware=LAPTOP)
    assert adapted.stages["denoiser"].lora == LoraPlan()


def test_ways_multiply(images: StageGraph) -> None:
    ways = {"cfg_parallel": 2, "sequence_parallel": 2}
    denoiser = load_plan(images, {"stages": {"denoiser": ways}}, hardware=FOUR).stages["denoiser"]
    assert (denoiser.cfg_parallel, denoiser.sequence_parallel, denoiser.tensor_parallel) == (2, 2, 1)
    assert (denoiser.ranks, denoiser.replicas, len(denoiser.devices)) == (4, 1, 4)
    here = load_plan(images, {"stages": {"denoiser": {**ways, "tensor_parallel": 2}}}, hardware=LAPTOP)
    assert here.stages["denoiser"].ranks == 8
    eight = {"stages": {"denoiser": {**ways, "tensor_parallel": 2}}}
    every = r"denoiser\.sequence_parallel x cfg_parallel x tensor_parallel is 8, but the stage has 4 GPUs .* a multiple"
    with pytest.raises(ConfigError, match=every):
        load_plan(images, eight, hardware=FOUR)
    three = {"stages": {"denoiser": {**ways, "devices": ["cuda:0", "cuda:1", "cuda:2"]}}}
    with pytest.raises(ConfigError, match=r"sequence_parallel x cfg_parallel is 4, but the stage has 3 GPUs"):
        load_plan(images, three, hardware=FOUR)


@pytest.mark.parametrize(
    ("ranks", "mode", "ring"),
    [
        (2, "ulysses", 1),
        (2, "ring", 2),
        (4, {"ulysses": 2, "ring": 2}, 2),
        (4, {"ring": 4}, 4),
        (4, {"ulysses": 4}, 1),
    ],
)
def test_what_is_exchanged(images: StageGraph, ranks: int, mode: object, ring: int) -> None:
    said = {"stages": {"denoiser": {"sequence_parallel": ranks, "sequence_mode": mode}}}
    assert load_plan(images, said, hardware=FOUR).stages["denoiser"].sequence_ring == ring
    below = {"defaults": {"sequence_mode": mode}}
    assert load_plan(images, below, hardware=FOUR).stages["denoiser"].sequence_ring == 1


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"sequence_mode": "ring"}, r"sequence_mode is set, but sequence_parallel is 1"),
        (
            {"sequence_parallel": 2, "sequence_mode": "star"},
            r"sequence_mode is 'star'; it must be one of ulysses, ring",
        ),
        (
            {"sequence_parallel": 2, "sequence_mode": {"ulysses": 2, "ring": 2}},
            r"sequence_mode is ulysses 2 x ring 2, which is 4, but sequence_parallel is 2; the product must equal it",
        ),
        ({"sequence_parallel": 4, "sequence_mode": {"rings": 2}}, r"sequence_mode has no key 'rings'; did you mean"),
        ({"sequence_parallel": 4, "sequence_mode": {"ring": 0}}, r"sequence_mode\.ring is 0; it must be an integer of"),
    ],
)
def test_what_cannot_be_exchanged(images: StageGraph, said: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"stages\.denoiser\.{message}"):
        load_plan(images, {"stages": {"denoiser": said}}, hardware=FOUR)
