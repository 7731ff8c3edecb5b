"""What a deployment file says, in one form whichever way it was written; nothing is worked out here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from segue.graph.deployment import Limits
from segue.graph.section import Section, as_mapping, wrong
from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.errors import ConfigError, nearest

TOP_KEYS = ("defaults", "stages", "stage_args", "edges", "connectors", "runtime", "limits")
LIMIT_KEYS = tuple(field.name for field in fields(Limits))
AUTOREGRESSIVE_KEYS = (
    "max_tokens_per_step",
    "prefill_chunk",
    "max_model_len",
    "block_size",
    "kv_blocks",
    "prefix_caching",
    "prefix_states",
    "max_logprobs",
    "scheduling",
    "attention",
    "tensor_parallel",
    "enforce_eager",
    "compile",
    "deterministic",
    "speculation",
    "quantization",
    "kv_dtype",
    "sampling",
)
RANK_KEYS = ("tensor_parallel", "cfg_parallel", "sequence_parallel")
"""Ways to have several processes per replica."""
DIFFUSION_KEYS = (
    "attention",
    "enforce_eager",
    "compile",
    "quantization",
    "gguf",
    "offload",
    "sequence_mode",
    *RANK_KEYS,
)
STAGE_KEYS = (
    "devices",
    "replicas",
    "memory_share",
    "dtype",
    "threads",
    "max_batch",
    "load_format",
    "fuse_with",
    "options",
    "lora",
    *AUTOREGRESSIVE_KEYS,
    *(key for key in DIFFUSION_KEYS if key not in AUTOREGRESSIVE_KEYS),
)
_KINDS = {"autoregressive": (*AUTOREGRESSIVE_KEYS, "lora"), "diffusion": (*DIFFUSION_KEYS, "lora")}
"""Keys that only stages of some engines have, by engine."""
_WIRING = ("input_connectors", "output_connectors")
_FOREIGN = {
    "device": "devices",
    "default_sampling_params": "sampling",
    "enable_prefix_caching": "prefix_caching",
    "engine_args": "the keys of a stage (see segue.graph.deployment)",
    "engine_extras": "options",
    "gpu_memory_utilization": "memory_share",
    "kv_cache_dtype": "kv_dtype",
    "max_batch_size": "max_batch",
    "max_num_batched_tokens": "max_tokens_per_step",
    "max_num_seqs": "max_batch",
    "num_replicas": "replicas",
    "scheduling_policy": "scheduling",
    "tensor_parallel_size": "tensor_parallel",
    "speculative_config": "speculation",
    "enable_lora": "lora",
    "max_lora_rank": "lora.max_rank",
    "max_loras": "lora.max_adapters",
}
"""What vllm-omni calls a key of ours (its `docs/configuration/stage_configs.md`), for the error message."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What one place of the file says of one edge."""

    path: str
    """Of the connector's name, or of the entry where it names none."""
    source: str
    target: str
    connector: str | None
    budget: int | None


@dataclass(frozen=True, slots=True)
class Written:
    """A deployment file, with every key known to exist and every stage known to the graph."""

    stages: dict[str, Section]
    """Every stage of the graph; those the file is silent on have an empty section. `defaults` lies below each."""
    wires: list[Wire]
    connectors: dict[str, Section]
    limits: Section


def read(graph: StageGraph, values: object, overrides: Mapping[str, Any]) -> Written:
    """Sort a parsed file into sections. `overrides` are stage keys that win over the file's `defaults`."""
    top = Section("", values, TOP_KEYS)
    defaults = Section("defaults", top.mapping("defaults"), STAGE_KEYS, foreign=_FOREIGN)
    below = Section("overrides", overrides, STAGE_KEYS, foreign=_FOREIGN, below=defaults)
    stages: dict[str, Section] = {}
    wires = list(_edges(graph, top))
    for name, path, entry, keys in _stage_entries(graph, top):
        if name in stages:
            raise ConfigError(f"{path} is stage {name!r}, which {stages[name].path} is already", field=path)
        # the input stage works on the CPU for all the others: what is meant for the networks does not concern it
        section = Section(path, entry, keys, below=None if name == INPUT else below, foreign=_FOREIGN)
        _check_engine(graph, name, section)
        wires.extend(_wiring(graph, name, section))
        stages[name] = section
    for name in graph.topological():
        stages.setdefault(name, Section(f"stages.{name}", {}, STAGE_KEYS, below=None if name == INPUT else below))
    return Written(stages, wires, dict(_connectors(top)), Section("limits", top.mapping("limits"), LIMIT_KEYS))


def _stage_entries(graph: StageGraph, top: Section) -> Iterator[tuple[str, str, object, tuple[str, ...]]]:
    """(stage, path, what it says, keys it may have) of every stage the file speaks of."""
    _, written = top.find("stages")
    if not isinstance(written, list):
        for name, entry in top.mapping("stages").items():
            if name not in graph.stages:
                raise ConfigError(
                    f"stages has {name!r}, which is no stage of {graph.name!r}{nearest(name, graph.stages)}",
                    field=f"stages.{name}",
                )
            yield name, f"stages.{name}", entry, (*STAGE_KEYS, *_WIRING)
    for key in ("stages", "stage_args"):
        if key == "stage_args" or isinstance(written, list):
            for path, entry in top.entries(key):
                fields = as_mapping(path, entry)
                yield _named_stage(graph, path, fields), path, fields, (*STAGE_KEYS, *_WIRING, "stage_id", "stage_name")


def _named_stage(graph: StageGraph, path: str, entry: Mapping[str, Any]) -> str:
    """The stage that an entry of a list means by `stage_name`, `stage_id`, or both."""
    names = [
        stage_of(graph, f"{path}.{key}", entry[key]) for key in ("stage_name", "stage_id") if entry.get(key) is not None
    ]
    if not names:
        raise ConfigError(f"{path} names no stage; it needs stage_name or stage_id", field=path)
    if len(set(names)) > 1:
        raise ConfigError(
            f"{path}.stage_id is {entry['stage_id']!r}, which is {names[1]!r}, but stage_name is {names[0]!r}",
            field=f"{path}.stage_id",
        )
    return names[0]


def stage_of(graph: StageGraph, path: str, value: object) -> str:
    """The stage a name or a number means. Numbers count the stages from 0 in topological order, `input` left out."""
    counted = [name for name in graph.topological() if name != INPUT]
    if isinstance(value, str) and value in graph.stages:
        return value
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is int and 0 <= number < len(counted):
        return counted[number]
    if isinstance(value, str) and not value.isdecimal():
        raise ConfigError(
            f"{path} is {value!r}, which is no stage of {graph.name!r}{nearest(value, graph.stages)}", field=path
        )
    raise wrong(path, value, f"a stage: {', '.join(f'{place} ({name})' for place, name in enumerate(counted))}")


def _check_engine(graph: StageGraph, name: str, section: Section) -> None:
    """A key in a stage's own section must mean something to its engine."""
    engine = graph.stages[name].engine
    for key in section.values:
        kinds = [kind for kind, keys in _KINDS.items() if key in keys]
        if kinds and engine not in kinds:
            raise ConfigError(
                f"{section.at(key)} is for {' and '.join(kinds)} stages; {name!r} has the {engine} engine",
                field=section.at(key),
            )


def _edges(graph: StageGraph, top: Section) -> Iterator[Wire]:
    for path, entry in top.entries("edges"):
        section = Section(path, entry, ("from", "to", "connector", "budget"))
        ends = []
        for key in ("from", "to"):
            _, value = section.find(key)
            if value is None:
                raise ConfigError(f"{path} has no {key!r}; an edge needs from and to", field=section.at(key))
            ends.append(stage_of(graph, section.at(key), value))
        _check_edge(graph, path, ends[0], ends[1])
        connector = _connector_name(*section.find("connector"))
        where = section.at("connector") if connector else path
        yield Wire(where, ends[0], ends[1], connector, section.size("budget", None))


def _wiring(graph: StageGraph, stage: str, section: Section) -> Iterator[Wire]:
    """The edges that `input_connectors` and `output_connectors` of a stage speak of."""
    for key, prefix in (("input_connectors", "from_stage_"), ("output_connectors", "to_stage_")):
        for name, value in section.mapping(key).items():
            path = f"{section.at(key)}.{name}"
            if not name.startswith(prefix):
                raise ConfigError(f"{path}: keys of {key} must look like {prefix}<stage>", field=path)
            other = stage_of(graph, path, name.removeprefix(prefix))
            source, target = (other, stage) if prefix == "from_stage_" else (stage, other)
            _check_edge(graph, path, source, target)
            yield Wire(path, source, target, _connector_name(path, value), None)


def _check_edge(graph: StageGraph, path: str, source: str, target: str) -> None:
    if target not in graph.downstreams(source):
        known = [f"{edge.source} -> {edge.target}" for edge in graph.edges]
        raise ConfigError(
            f"{path} is {source} -> {target}, which is no edge of {graph.name!r}"
            f"{nearest(f'{source} -> {target}', known)}",
            field=path,
        )


def _connector_name(path: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise wrong(path, value, "the name of a connector")
    return value


def _connectors(top: Section) -> Iterator[tuple[str, Section]]:
    runtime = Section("runtime", top.mapping("runtime"), ("connectors",))
    seen: dict[str, str] = {}
    for place in (runtime, top):
        for name, entry in place.mapping("connectors").items():
            path = f"{place.at('connectors')}.{name}"
            if name in seen:
                raise ConfigError(f"{path} is defined twice; the other is {seen[name]}", field=path)
            seen[name] = path
            yield name, Section(path, entry, ("name", "extra"))
