"""The deployment file: what it may say, and how every mistake in it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from segue.graph.deployment import deployment as deployment_module
from segue.graph.deployment.deployment import Hardware, Limits, MiB, MovePolicy, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams

Lay = Callable[..., Plan]

FULL = """
defaults: {dtype: float16, max_batch: 5, sampling: {top_k: 3}}
stages:
  thinker:
    devices: [cuda:0, cuda:1]
    replicas: 4
    routing: [session, load]
    memory_share: 0.25
    dtype: bfloat16
    threads: 2
    max_batch: 32
    load_format: dummy
    fuse_with: null
    options: {look_ahead: 2}
    max_tokens_per_step: 1024
    max_model_len: 4096
    block_size: 32
    kv_blocks: 100
    prefix_caching: false
    sampling: {temperature: 0.7, stop: [end]}
  vocoder: {devices: cpu, fuse_with: talker}
edges:
  - {from: thinker, to: talker, connector: wide, budget: 1GB}
  - {from: talker, to: vocoder, budget: 4096}
runtime:
  connectors:
    wide: {name: SharedMemoryConnector, extra: {shm_threshold_bytes: 64KiB, pool_bytes: 1.5MiB, max_bytes: 2GiB}}
    narrow: {name: SharedMemoryConnector}
limits:
  max_waiting: 3
  max_retries: 0
  default_deadline: 1.5
  retained_bytes: 1GiB
  drain_seconds: 2
  hang_seconds: 30
  max_media_bytes: 2MB
  max_image_pixels: 1000
  max_audio_seconds: 30
  max_video_frames: 4
  max_prompt_embeds_bytes: 1MB
moves: {queue_age: 2}
"""


def test_everything_that_can_be_said(graph: StageGraph, two_gpus: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(FULL)
    plan = load_plan(graph, path, hardware=two_gpus)
    thinker = plan.stages["thinker"]
    assert thinker.devices == ("cuda:0", "cuda:1")
    assert [thinker.device_of(replica) for replica in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert (thinker.replicas, thinker.memory_share, thinker.memory_bytes) == (4, 0.25, 20 << 30)
    assert (thinker.dtype, thinker.threads, thinker.max_batch, thinker.load_format) == ("bfloat16", 2, 32, "dummy")
    assert (thinker.max_tokens_per_step, thinker.max_model_len, thinker.block_size) == (1024, 4096, 32)
    assert (thinker.kv_blocks, thinker.prefix_caching, thinker.options) == (100, False, {"look_ahead": 2})
    assert thinker.routing == ("session", "load")
    assert thinker.sampling == SamplingParams(temperature=0.7, stop=["end"])
    talker = plan.stages["talker"]
    assert (talker.devices, talker.dtype, talker.max_batch) == (("cpu",), "float16", 5)
    assert talker.sampling == SamplingParams(top_k=3)
    assert plan.stages["vocoder"].sampling == SamplingParams()
    assert plan.stages["input"].dtype == "float32", "defaults are not for the input stage"
    wide = plan.edge("thinker", "talker")
    assert (wide.connector, wide.kind, wide.budget) == ("wide", "shm", 1_000_000_000)
    assert wide.extra == {"shm_threshold_bytes": 65536, "pool_bytes": 3 * MiB // 2, "max_bytes": 2048 * MiB}
    assert plan.edge("talker", "vocoder").kind == "inproc"
    assert plan.edge("talker", "vocoder").budget == 4096
    assert plan.edge("input", "thinker").connector == "shm"
    assert plan.groups == (("input",), ("encoder",), ("thinker",), ("talker", "vocoder"), ("output",))
    assert plan.group_of("vocoder") == ("talker", "vocoder")
    assert plan.moves == MovePolicy(queue_age=2.0, cooldown=60.0)
    assert plan.limits == Limits(
        max_waiting=3,
        max_retries=0,
        default_deadline=1.5,
        retained_bytes=1 << 30,
        drain_seconds=2.0,
        hang_seconds=30.0,
        max_media_bytes=2_000_000,
        max_image_pixels=1000,
        max_audio_seconds=30.0,
        max_video_frames=4,
        max_prompt_embeds_bytes=1_000_000,
    )


def test_the_documented_file_loads(plan: Lay) -> None:
    text = (deployment_module.__doc__ or "").split("\n\n")
    example = next(part for part in text if "defaults:" in part)
    laid = plan(yaml.safe_load(example))
    assert laid.stages["thinker"].sampling.temperature == 0.7
    assert laid.edge("thinker", "talker").extra == {
        "shm_threshold_bytes": 65536,
        "pool_bytes": 64 * MiB,
        "max_bytes": 512 * MiB,
    }


@pytest.mark.parametrize("nothing", [None, {}, {"stages": None, "limits": None}, {"stages": {"thinker": None}}])
def test_silence_is_the_defaults(plan: Lay, nothing: dict[str, Any] | None) -> None:
    laid = plan(nothing)
    assert laid.limits == Limits()
    assert laid.moves is None
    assert laid.stages == plan().stages
    assert laid.stages["thinker"].max_batch == 64
    assert laid.stages["vocoder"].max_batch == 16


def test_overrides_come_before_defaults_and_after_stages(plan: Lay) -> None:
    laid = plan(
        {"defaults": {"dtype": "float16", "block_size": 8}, "stages": {"talker": {"dtype": "bfloat16"}}},
        overrides={"dtype": "float32"},
    )
    assert laid.stages["thinker"].dtype == "float32"
    assert laid.stages["talker"].dtype == "bfloat16"
    assert laid.stages["thinker"].block_size == 8
    with pytest.raises(ConfigError, match="overrides has no key 'dtyp'; did you mean 'dtype'"):
        plan(overrides={"dtyp": "float32"})


def test_null_takes_a_default_back(plan: Lay) -> None:
    laid = plan({"defaults": {"max_batch": 7}, "stages": {"talker": {"max_batch": None}}})
    assert laid.stages["thinker"].max_batch == 7
    assert laid.stages["talker"].max_batch == 64


def stage(**keys: Any) -> dict[str, Any]:
    return {"stages": {"thinker": keys}}


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ({"stage": {}}, r"the deployment has no key 'stage'; did you mean 'stages'\?"),
        ([1], r"the deployment is \[1\]; it must be a mapping"),
        ({"stages": {"thinkr": {}}}, r"stages has 'thinkr', which is no stage of 'omni'; did you mean 'thinker'\?"),
        ({"stages": {"thinker": 3}}, "stages.thinker is 3; it must be a mapping"),
        ({"stages": 3}, "stages is 3; it must be a mapping"),
        ({"stages": {3: {}}}, "stages has the key 3; keys must be text"),
        (stage(max_bach=1), r"stages.thinker has no key 'max_bach'; did you mean 'max_batch'\?"),
        (stage(gpu_memory_utilization=0.5), "no key 'gpu_memory_utilization'; write memory_share instead"),
        (stage(device="cpu"), "no key 'device'; write devices instead"),
        (stage(max_batch="many"), "stages.thinker.max_batch is 'many'; it must be an integer of at least 1"),
        (stage(max_batch=0), "stages.thinker.max_batch is 0; it must be an integer of at least 1"),
        (stage(max_batch=True), "stages.thinker.max_batch is True; it must be an integer"),
        (stage(replicas=0), "stages.thinker.replicas is 0; it must be an integer of at least 1"),
        (stage(routing="prefx"), r"stages.thinker.routing is 'prefx'; it must be of load, .*did you mean 'prefix'"),
        (
            stage(routing=["load", "load"]),
            "stages.thinker.routing is .*; it must be one of load, prefix, session, or a",
        ),
        (stage(routing=[]), r"stages.thinker.routing is \[\]; it must be one of"),
        (
            {"stages": {"talker": {"routing": "load"}, "vocoder": {"routing": "session", "fuse_with": "talker"}}},
            "'vocoder' has routing session and 'talker' has load; fused stages share a worker",
        ),
        (stage(memory_share=1.5), "stages.thinker.memory_share is 1.5; it must be a number above 0 and at most 1"),
        (stage(memory_share="half"), "stages.thinker.memory_share is 'half'; it must be a number"),
        (stage(prefix_caching="yes"), "stages.thinker.prefix_caching is 'yes'; it must be true or false"),
        (stage(dtype="float23"), r"stages.thinker.dtype is 'float23'; it must be one of .*did you mean 'float32'\?"),
        (stage(load_format="dumy"), r"stages.thinker.load_format is 'dumy'; .*did you mean 'dummy'\?"),
        (stage(options=[1]), r"stages.thinker.options is \[1\]; it must be a mapping"),
        (
            stage(sampling={"temprature": 1}),
            r"thinker.sampling has no parameter 'temprature'; did you mean 'temperature'",
        ),
        (
            stage(sampling={"temperature": 9}),
            "stages.thinker.sampling.temperature is 9.0; it must be a number from 0 to",
        ),
        (stage(sampling={"stop": 9}), "stages.thinker.sampling.stop: Expected `array"),
        ({"stages": {"vocoder": {"kv_blocks": 9}}}, "stages.vocoder.kv_blocks is for autoregressive stages; 'vocoder'"),
        ({"moves": {"queue_agee": 1}}, r"moves has no key 'queue_agee'; did you mean 'queue_age'"),
        ({"moves": {}}, "moves.queue_age is None; it must be a number of seconds above 0"),
        ({"moves": {"queue_age": 0}}, "moves.queue_age is 0; it must be a number above 0"),
        ({"moves": 5}, "moves is 5; it must be a mapping"),
        ({"defaults": {"threds": 1}}, r"defaults has no key 'threds'; did you mean 'threads'\?"),
        ({"defaults": {"max_batch": -1}}, "defaults.max_batch is -1; it must be an integer of at least 1"),
        (
            stage(threads=10**6),
            "stages.thinker.threads is 1000000; it must be an integer of at least 1 and at most 1024",
        ),
        ({"limits": {"max_wating": 1}}, r"limits has no key 'max_wating'; did you mean 'max_waiting'\?"),
        (
            {"limits": {"retained_bytes": "much"}},
            "limits.retained_bytes is 'much'; it must be a size of at least 1 byte",
        ),
        ({"limits": {"retained_bytes": 1.5}}, "limits.retained_bytes is 1.5; it must be a size"),
        ({"limits": {"retained_bytes": "0.5B"}}, "limits.retained_bytes is '0.5B'; it must be a size"),
        ({"limits": {"max_retries": -1}}, "limits.max_retries is -1; it must be an integer of at least 0"),
        ({"limits": {"drain_seconds": 0}}, "limits.drain_seconds is 0; it must be a number above 0$"),
        ({"limits": {"default_deadline": float("inf")}}, "limits.default_deadline is inf; it must be a number above 0"),
    ],
)
def test_mistake(plan: Lay, deployment: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(deployment)
    assert caught.value.field is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: {thinker: [}", "line 1: not YAML"),
        ("a: 1\nb: 2\n\ta: 3", "line 3: not YAML"),
        ("limits: {}\nlimits: {}", "line 2: not YAML: the key 'limits' is written twice"),
        ("? [a]\n: 1", "not YAML: found unhashable key"),
        ("\x00", "not YAML"),
        ("just words", "the deployment is 'just words'; it must be a mapping"),
        ("!!python/object/apply:os.getcwd []", "not YAML: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_deployment(
    graph: StageGraph, laptop: Hardware, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_plan(graph, str(path), hardware=laptop)


def test_a_missing_file(graph: StageGraph, laptop: Hardware, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml' is not a file"):
        load_plan(graph, tmp_path / "missing.yaml", hardware=laptop)


def test_an_empty_file(graph: StageGraph, laptop: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert load_plan(graph, path, hardware=laptop).stages == load_plan(graph, hardware=laptop).stages


def test_a_wrong_graph_is_refused_first(laptop: Hardware) -> None:
    with pytest.raises(ConfigError, match="no stage gives anything"):
        load_plan(StageGraph("empty"), hardware=laptop)


def test_without_hardware_it_is_this_machine(graph: StageGraph) -> None:
    plan = load_plan(graph)
    assert plan.hardware.cpus >= 1
    assert plan.hardware.memory_bytes > MiB


def test_weights_of_a_denoiser_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = StageGraph("pictures")
    images.stage("denoiser", "diffusion", takes={"text"}, gives={"image"})
    monkeypatch.chdir(tmp_path)

    def files(said: object) -> dict[str, str]:
        return load_plan(images, {"stages": {"denoiser": {"gguf": said}}}).stages["denoiser"].gguf

    assert files("model.gguf") == {"transformer": str(tmp_path / "model.gguf")}
    both = {"transformer": "/srv/high.gguf", "transformer_2": "/srv/low.gguf"}
    assert files(both) == both
    assert files(None) == {}
    for wrong in (3, {"transformer": 3}, ["model.gguf"]):
        with pytest.raises(ConfigError, match=r"stages\.denoiser\.gguf is .*; it must be a GGUF file"):
            files(wrong)


def test_who_runs_first() -> None:
    g = StageGraph("both")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("denoiser", "diffusion")
    g.stage("decoder", "module", gives={"image"})
    g.edge("llm", "denoiser")
    g.edge("denoiser", "decoder")
    machine = Hardware(cpus=2, memory_bytes=1 << 34)

    def laid(values: dict[str, Any] | None, **overrides: str) -> dict[str, str]:
        return {n: s.scheduling for n, s in load_plan(g, values, hardware=machine, overrides=overrides).stages.items()}

    everywhere = {"input", "llm", "denoiser", "decoder", "output"}
    assert laid(None) == dict.fromkeys(everywhere, "fcfs")
    assert laid(None, scheduling="priority") == dict.fromkeys(everywhere, "priority")
    assert laid({"stages": {"llm": {"scheduling": "priority"}}}) == {
        **dict.fromkeys(everywhere, "priority"),
        "denoiser": "fcfs",
    }
    assert laid(None, scheduling="fair") == {**dict.fromkeys(everywhere, "fcfs"), "llm": "fair"}
    with pytest.raises(ConfigError, match=r"stages.denoiser.scheduling is 'fair'; it must be one of fcfs, priority"):
        laid({"stages": {"denoiser": {"scheduling": "fair"}}})
