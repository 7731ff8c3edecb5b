"""Lay a deployment over a graph. The one place a deployment file is read; its form is in `segue.graph.deployment`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from segue.graph.deployment import (
    ATTENTIONS,
    DIFFUSION_ATTENTIONS,
    KV_DTYPES,
    OFFLOADS,
    QUANTIZATIONS,
    SCHEDULINGS,
    SEQUENCE_MODES,
    Hardware,
    Limits,
    Plan,
    StagePlan,
)
from segue.graph.hardware import detect_hardware
from segue.graph.lora import ADAPTED, LoraPlan, lora_of
from segue.graph.place import Place
from segue.graph.placement import place
from segue.graph.section import Section, wrong
from segue.graph.speculation import speculation_of
from segue.graph.stage_graph import Stage, StageGraph
from segue.graph.wiring import define, plan_edges
from segue.graph.wishes import CPU, denoiser_ways
from segue.graph.written import Written, read
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.sampling import SamplingParams, sampling_from

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_MAX_BATCH = {"autoregressive": 64, "diffusion": 16, "module": 16}
_TOKENS_PER_STEP = {"cpu": 512, "cuda": 2048}
"""A step's tokens by default: long enough to be bound by arithmetic, short enough not to hold up who is decoding."""
_PREFILL_CHUNK = {"cpu": 256, "cuda": None}
"""Of them, prompt tokens where others decode: from about 256 rows on, a CPU's products are near their peak, so smaller
steps cost little; a GPU is done with the whole step in a few tens of milliseconds."""


def load_plan(
    graph: StageGraph,
    deployment: Path | str | Mapping[str, Any] | None = None,
    *,
    hardware: Hardware | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a graph.

    `deployment` is a file, or what it would parse to; without one, everything comes from the hardware.
    `hardware` is this machine's where it is not given. `overrides` are keys of a stage, from the command line or the
    caller, that win over the deployment's `defaults`, e.g. {"dtype": "float32"}.
    Raises `ConfigError` naming the key's path and what would be right.
    """
    graph.validate()
    values = read_deployment(Path(deployment)) if isinstance(deployment, Path | str) else deployment
    written = read(graph, values, overrides or {})
    connectors = define(written.connectors)
    machine = hardware or detect_hardware()
    groups, places = place(graph, written.stages, machine, connectors, written.wires)
    return Plan(
        graph=graph,
        stages={name: _stage(graph.stages[name], written, places[name]) for name in graph.topological()},
        edges=plan_edges(graph, connectors, written.wires, groups),
        groups=groups,
        limits=_limits(written.limits),
        hardware=machine,
    )


def read_deployment(path: Path) -> object:
    """The parsed file, not yet checked; None where it is empty."""
    where = f"deployment {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{where} is no file", field="deployment")
    try:
        # a SafeLoader that also refuses a key written twice
        return yaml.load(path.read_bytes(), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: not YAML: {error.problem}", field="deployment") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {error}", field="deployment") from error


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value!r} is written twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def stage_overrides(
    dtype: str | None,
    *,
    deterministic: bool = False,
    speculation: Mapping[str, Any] | None = None,
    tensor_parallel: int | None = None,
    quantization: str | None = None,
    kv_dtype: str | None = None,
    scheduling: str | None = None,
    lora: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keys of a stage that a caller may set for all stages; what is unset is left to the file. An empty `lora` is set:
    it lets adapters be loaded later."""
    given = {
        "dtype": dtype or None,
        "deterministic": deterministic or None,
        "speculation": speculation or None,
        "tensor_parallel": tensor_parallel,
        "quantization": quantization,
        "kv_dtype": kv_dtype,
        "scheduling": scheduling,
        "lora": lora,
    }
    return {key: value for key, value in given.items() if value is not None}


def _stage(stage: Stage, written: Written, where: Place) -> StagePlan:
    section = written.stages[stage.name]
    autoregressive = stage.engine == "autoregressive"
    ways = denoiser_ways(section) if stage.engine == "diffusion" else {"tensor_parallel": where.ranks}
    device = CPU if CPU in where.devices else "cuda"
    dtype = section.choice("dtype", "auto", _DTYPES)
    if dtype == "auto":
        dtype = "float32" if device == CPU else "bfloat16"
    return StagePlan(
        name=stage.name,
        engine=stage.engine,
        devices=where.devices,
        replicas=where.replicas,
        memory_share=where.memory_share,
        memory_bytes=where.memory_bytes,
        dtype=dtype,
        threads=where.threads,
        max_batch=section.integer("max_batch", _MAX_BATCH[stage.engine]),
        load_format=section.choice("load_format", "auto", ("auto", "dummy")),
        options=section.mapping("options"),
        max_tokens_per_step=section.integer("max_tokens_per_step", _TOKENS_PER_STEP[device]),
        prefill_chunk=section.integer("prefill_chunk", _PREFILL_CHUNK[device]),
        max_model_len=section.integer("max_model_len", None),
        block_size=section.integer("block_size", 16),
        kv_blocks=section.integer("kv_blocks", None),
        prefix_caching=section.flag("prefix_caching", True),
        prefix_states=section.integer("prefix_states", None, least=0),
        deterministic=section.flag("deterministic", False),
        max_logprobs=section.integer("max_logprobs", 20, least=-1),
        scheduling=section.choice("scheduling", "priority", SCHEDULINGS),
        attention=_attention(section, stage.engine),
        enforce_eager=section.flag("enforce_eager", False),
        compile=section.flag("compile", False),
        tensor_parallel=ways.get("tensor_parallel", 1),
        cfg_parallel=ways.get("cfg_parallel", 1),
        sequence_parallel=ways.get("sequence_parallel", 1),
        sequence_ring=_ring(section, ways.get("sequence_parallel", 1)),
        speculation=speculation_of(section) if autoregressive else None,
        quantization=_quantization(section, device) if stage.engine != "module" else "none",
        gguf=_gguf(section) if stage.engine == "diffusion" else {},
        offload=section.choice("offload", "none", OFFLOADS) if stage.engine == "diffusion" else "none",
        kv_dtype=section.choice("kv_dtype", "auto", KV_DTYPES) if autoregressive else "auto",
        lora=_lora(section) if stage.engine in ADAPTED else None,
        sampling=_sampling(section) if autoregressive else SamplingParams(),
    )


def _attention(section: Section, engine: str) -> str:
    """Kernels have other names in stages of other engines: what is meant for all means those that know it."""
    names, others = (DIFFUSION_ATTENTIONS, ATTENTIONS) if engine == "diffusion" else (ATTENTIONS, DIFFUSION_ATTENTIONS)
    _, value = section.find("attention")
    if "attention" not in section.values and value in others:
        return str(value) if value in names else "auto"
    return section.choice("attention", "auto", names)


def _quantization(section: Section, device: str) -> str:
    kind = section.choice("quantization", "none", QUANTIZATIONS)
    if kind == "bfloat16" and device != CPU:
        path, _ = section.find("quantization")
        raise ConfigError(
            f"{path} is 'bfloat16', which is for stages on a CPU; on a GPU that is what `dtype: bfloat16` is, or "
            "quantization must be int8, int4 or fp8",
            field=path,
        )
    return kind


def _ring(section: Section, ranks: int) -> int:
    """Of so many ranks that share tokens, how many are in a ring. `sequence_mode` is one mode for all of them, or says
    how many have each: their product."""
    path, mode = section.find("sequence_mode")
    if "sequence_mode" in section.values and ranks == 1:
        raise ConfigError(f"{path} is set, but sequence_parallel is 1; set it, or leave sequence_mode out", field=path)
    if not isinstance(mode, Mapping):
        return ranks if section.choice("sequence_mode", SEQUENCE_MODES[0], SEQUENCE_MODES) == "ring" else 1
    both = Section(path, mode, SEQUENCE_MODES)
    ulysses, ring = (both.integer(key, 1) for key in SEQUENCE_MODES)
    if ranks > 1 and ulysses * ring != ranks:
        raise ConfigError(
            f"{path} is ulysses {ulysses} x ring {ring}, which is {ulysses * ring}, but sequence_parallel is {ranks}; "
            f"the two must multiply to it",
            field=path,
        )
    return ring if ranks > 1 else 1


def _gguf(section: Section) -> dict[str, str]:
    """A file alone is that of the network that every transformer pipeline has."""
    path, value = section.find("gguf")
    if value is None:
        return {}
    files = {"transformer": value} if isinstance(value, str) else value
    named = isinstance(files, Mapping) and all(isinstance(name, str) for name in files)
    if not named or not all(isinstance(file, str) and file for file in files.values()):
        raise wrong(path, value, "a GGUF file, or such files by network (transformer, transformer_2, unet)")
    return {name: os.path.abspath(os.path.expanduser(file)) for name, file in files.items()}


def _lora(section: Section) -> LoraPlan | None:
    plan = lora_of(section)
    if plan is not None and section.flag("deterministic", False):
        path, _ = section.find("lora")
        raise ConfigError(
            f"{path} is set and so is deterministic; what adapters add depends on who else is in a step", field=path
        )
    return plan


def _sampling(section: Section) -> SamplingParams:
    path, _ = section.find("sampling")
    try:
        sampling = sampling_from(section.mapping("sampling"), path)
    except InvalidRequest as error:  # the same checks, but here it is the deployment that must be mended
        raise ConfigError(error.message, field=error.field) from error
    if sampling.n is not None:
        raise ConfigError(f"{path}.n is {sampling.n}; only a request can ask for several outputs", field=f"{path}.n")
    return sampling


def _limits(section: Section) -> Limits:
    default = Limits()
    return Limits(
        max_waiting=section.integer("max_waiting", default.max_waiting),
        max_retries=section.integer("max_retries", default.max_retries, least=0),
        default_deadline=section.number("default_deadline", default.default_deadline),
        retained_bytes=section.size("retained_bytes", default.retained_bytes),
        drain_seconds=section.number("drain_seconds", default.drain_seconds),
        hang_seconds=section.number("hang_seconds", default.hang_seconds),
        max_media_bytes=section.size("max_media_bytes", default.max_media_bytes),
        max_prompt_embeds_bytes=section.size("max_prompt_embeds_bytes", default.max_prompt_embeds_bytes, least=0),
        max_image_pixels=section.integer("max_image_pixels", default.max_image_pixels),
        max_audio_seconds=section.number("max_audio_seconds", default.max_audio_seconds),
        max_video_frames=section.integer("max_video_frames", default.max_video_frames),
        max_output_pixels=section.integer("max_output_pixels", default.max_output_pixels),
        max_inference_steps=section.integer("max_inference_steps", default.max_inference_steps),
        max_output_frames=section.integer("max_output_frames", default.max_output_frames),
        max_outputs=section.integer("max_outputs", default.max_outputs),
    )
