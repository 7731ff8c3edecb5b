"""Make a `Plan` from a graph and a deployment. Only this module reads deployment files, whose format is documented in
`segue.graph.deployment.deployment`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from segue.graph.deployment.deployment import (
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
from segue.graph.deployment.options import ADAPTED, LoraPlan, lora_of, speculation_of
from segue.graph.deployment.section import Section, wrong
from segue.graph.deployment.written import CPU, Written, denoiser_ways, read
from segue.graph.machine.hardware import detect_hardware
from segue.graph.plan.groups import Place
from segue.graph.plan.placement import place
from segue.graph.plan.wiring import define, plan_edges
from segue.graph.stage_graph import Stage, StageGraph
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.sampling import SamplingParams, sampling_from

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_MAX_BATCH = {"autoregressive": 64, "diffusion": 16, "module": 16}
_TOKENS_PER_STEP = {"cpu": 512, "cuda": 2048}
"""Default tokens per step: enough to be compute-bound, few enough not to delay requests that are decoding."""
_PREFILL_CHUNK = {"cpu": 256, "cuda": None}
"""Default prompt tokens in a step in which other requests decode: from about 256 rows on, a CPU's GEMMs are near their
peak, so smaller steps cost little; a GPU finishes the whole step in a few tens of milliseconds."""


def load_plan(
    graph: StageGraph,
    deployment: Path | str | Mapping[str, Any] | None = None,
    *,
    hardware: Hardware | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """Make the plan of a graph.

    `deployment` is a file or its parsed contents; without one, everything is chosen by the hardware. `hardware`
    defaults to this machine's. `overrides` are keys of a stage, from the command line or the caller, that override the
    deployment's `defaults`, e.g. {"dtype": "float32"}.
    Raises `ConfigError` naming the key's path and the remedy.
    """
    graph.validate()
    values = read_deployment(Path(deployment)) if isinstance(deployment, Path | str) else deployment
    written = read(graph, values, overrides or {})
    connectors = define(written.connectors)
    machine = hardware or detect_hardware()
    groups, places = place(graph, written.stages, machine, connectors, written.wires)
    stages = {name: _stage(graph.stages[name], written, places[name]) for name in graph.topological()}
    if any(stage.scheduling == "priority" for stage in stages.values()):
        for name, stage in stages.items():  # module stages have no key of their own: same order
            if stage.engine == "module":
                stages[name] = replace(stage, scheduling="priority")
    return Plan(
        graph=graph,
        stages=stages,
        edges=plan_edges(graph, connectors, written.wires, groups),
        groups=groups,
        limits=_limits(written.limits),
        hardware=machine,
        said={name: _said(written.stages[name]) for name in graph.topological()},
    )


def _said(section: Section) -> dict[str, str]:
    """Return key → path of the settings that decide on devices, dtype and memory."""
    found = {key: section.find(key) for key in ("devices", "dtype", "memory_share")}
    return {key: path for key, (path, value) in found.items() if value not in (None, "auto")}


def read_deployment(path: Path) -> object:
    """Parse a deployment file without checking its keys; an empty file gives None."""
    where = f"deployment {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{where} is not a file", field="deployment")
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
    """Return the stage keys that a caller sets for all stages, leaving unset ones to the file. An empty `lora` counts
    as set: it allows adapters to be loaded later."""
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
    speculates = autoregressive and "speculation" not in stage.without
    adapted = stage.engine in ADAPTED and "lora" not in stage.without
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
        scheduling=_scheduling(section, stage.engine),
        attention=_attention(section, stage.engine),
        enforce_eager=section.flag("enforce_eager", False),
        compile=section.flag("compile", False),
        tensor_parallel=ways.get("tensor_parallel", 1),
        cfg_parallel=ways.get("cfg_parallel", 1),
        sequence_parallel=ways.get("sequence_parallel", 1),
        sequence_ring=_ring(section, ways.get("sequence_parallel", 1)),
        speculation=speculation_of(section) if speculates else None,
        quantization=_quantization(section, device) if stage.engine != "module" else "none",
        gguf=_gguf(section) if stage.engine == "diffusion" else {},
        offload=section.choice("offload", "none", OFFLOADS) if stage.engine == "diffusion" else "none",
        kv_dtype=section.choice("kv_dtype", "auto", KV_DTYPES) if autoregressive else "auto",
        lora=_lora(section) if adapted else None,
        sampling=_sampling(section) if autoregressive else SamplingParams(),
    )


def _scheduling(section: Section, engine: str) -> str:
    """Return a stage's scheduling. Only autoregressive stages can be `fair`; others read a default `fair` as `fcfs`."""
    if engine == "autoregressive":
        return section.choice("scheduling", "fcfs", SCHEDULINGS)
    if "scheduling" not in section.values and section.find("scheduling")[1] == "fair":
        return "fcfs"
    return section.choice("scheduling", "fcfs", ("fcfs", "priority"))


def _attention(section: Section, engine: str) -> str:
    """Return a stage's attention backend. Engines have different ones: a default applies only to those that know it."""
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
            f"{path} is 'bfloat16', which is for stages on a CPU; on a GPU, set `dtype: bfloat16`, or make "
            "quantization int8, int4 or fp8",
            field=path,
        )
    return kind


def _ring(section: Section, ranks: int) -> int:
    """Return how many of the sequence parallel ranks form a ring. `sequence_mode` is one mode for all ranks, or gives
    each mode a number of ranks; the product is `ranks`."""
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
            f"the product must equal it",
            field=path,
        )
    return ring if ranks > 1 else 1


def _gguf(section: Section) -> dict[str, str]:
    """Return network → GGUF file. A single file is for `transformer`, which every transformer pipeline has."""
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
            f"{path} cannot be combined with deterministic: an adapter's output depends on the batch", field=path
        )
    return plan


def _sampling(section: Section) -> SamplingParams:
    path, _ = section.find("sampling")
    try:
        sampling = sampling_from(section.mapping("sampling"), path)
    except InvalidRequest as error:  # the same checks, but here the deployment must be corrected
        raise ConfigError(error.message, field=error.field) from error
    if sampling.n is not None:
        raise ConfigError(f"{path}.n is {sampling.n}; only a request can ask for several outputs", field=f"{path}.n")
    return sampling


_MAY_BE_ZERO = frozenset({"max_retries", "max_prompt_embeds_bytes"})


def _limits(section: Section) -> Limits:
    """Read the limits: keys that end in `_bytes` are sizes, the others numbers of their default's type."""

    def read(name: str, default: Any) -> Any:
        least = 0 if name in _MAY_BE_ZERO else 1
        if name.endswith("_bytes"):
            return section.size(name, default, least=least)
        if isinstance(default, int):
            return section.integer(name, default, least=least)
        return section.number(name, default)

    default = Limits()
    return Limits(**{field.name: read(field.name, getattr(default, field.name)) for field in fields(Limits)})
