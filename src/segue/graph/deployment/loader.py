"""Make a `Plan` from a graph and a deployment. Only this module reads deployment files, whose format is documented in
`segue.graph.deployment.deployment`.

Optional reading: makes a `Deployment` of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from segue.graph.deployment.deployment import Hardware, Hosts, Limits, MovePolicy, Plan
from segue.graph.deployment.ray_cluster import ray_plan
from segue.graph.deployment.section import Section, wrong
from segue.graph.deployment.stage_plan import CPU, StagePlan
from segue.graph.deployment.written import Written, read
from segue.graph.kinds.kind import ORDERS, EngineKind
from segue.graph.kinds.registry import kind_of, kinds
from segue.graph.machine.hardware import detect_hardware
from segue.graph.plan.groups import Place
from segue.graph.plan.placement import place
from segue.graph.plan.wiring import define, plan_edges
from segue.graph.stage_graph import Stage, StageGraph
from segue.messages.errors import ConfigError, nearest

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_plan(
    graph: StageGraph,
    deployment: Path | str | Mapping[str, Any] | None = None,
    *,
    hardware: Hardware | None = None,
    overrides: Mapping[str, Any] | None = None,
    skip_tokenizer_init: bool = False,
) -> Plan:
    """Make the plan of a graph.

    `deployment` is a file or its parsed contents; without one, everything is chosen by the hardware. `hardware`
    defaults to this machine's. `overrides` are keys of a stage, from the command line or the caller, that override the
    deployment's `defaults`, e.g. {"dtype": "float32"}; `skip_tokenizer_init`: true overrides the deployment's.
    Raises `ConfigError` naming the key's path and the remedy.
    """
    graph.validate()
    values = read_deployment(Path(deployment)) if isinstance(deployment, Path | str) else deployment
    written = read(graph, values, overrides or {})
    connectors = define(written.connectors)
    machine = hardware or detect_hardware()
    groups, places = place(graph, written.stages, Hosts(machine, written.hosts), connectors, written.wires)
    stages = {name: _stage(graph.stages[name], written, places[name]) for name in graph.topological()}
    _check_unused(graph, written.defaults)
    if any(stage.scheduling == "priority" for stage in stages.values()):
        for name, stage in stages.items():  # stages without a key of their own follow
            if "scheduling" not in kind_of(stage.engine).keys:
                stages[name] = replace(stage, scheduling="priority")
    nodes = {name: stage.node for name, stage in stages.items()}
    made = Plan(
        graph=graph,
        stages=stages,
        edges=plan_edges(graph, connectors, written.wires, groups, nodes),
        groups=groups,
        limits=_limits(written.limits),
        hardware=machine,
        moves=_moves(written.moves),
        skip_tokenizer_init=skip_tokenizer_init or written.skip_tokenizer_init,
        hosts=written.hosts,
        said={name: _said(written.stages[name]) for name in graph.topological()},
    )
    for name in written.hosts:
        if name not in made.nodes():
            hint = nearest(name, made.nodes())
            raise ConfigError(f"nodes has {name!r}, which is the node of no stage{hint}", field=f"nodes.{name}")
    return made if written.ray is None else replace(made, ray=ray_plan(written.ray, made.nodes()))


def _moves(section: Section | None) -> MovePolicy | None:
    if section is None:
        return None
    queue_age = section.number("queue_age", None)
    if queue_age is None:
        raise wrong(section.at("queue_age"), None, "a number of seconds above 0")
    return MovePolicy(queue_age, section.number("cooldown", 60.0))


def _said(section: Section) -> dict[str, str]:
    """Return key → path of the settings that decide on devices, dtype, memory and threads."""
    found = {key: section.find(key) for key in ("devices", "dtype", "memory_share", "threads")}
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


def _check_unused(graph: StageGraph, defaults: Section) -> None:
    """Check the keys under `defaults` of the kinds that have no stage in the graph."""
    section = Section("", {}, (), below=defaults)
    used = {stage.engine for stage in graph.stages.values()}
    checked = {key for engine in used for key in kind_of(engine).choices}
    for kind in kinds().values():
        if kind.name not in used:
            kind.check_defaults(section)
            for key in (key for key in kind.choices if key not in checked):
                _choice(section, key, kind)


def _stage(stage: Stage, written: Written, where: Place) -> StagePlan:
    section = written.stages[stage.name]
    kind = kind_of(stage.engine)
    dtype = section.choice("dtype", "auto", _DTYPES)
    if dtype == "auto":
        dtype = "float32" if CPU in where.devices else "bfloat16"
    choices = {key: _choice(section, key, kind) for key in kind.choices}
    of_every_stage = StagePlan(
        name=stage.name,
        engine=stage.engine,
        devices=where.devices,
        replicas=where.replicas,
        memory_share=where.memory_share,
        memory_bytes=where.memory_bytes,
        dtype=dtype,
        threads=where.threads,
        routing=where.routing,
        node=where.nodes,
        scaling=where.scaling,
        max_batch=section.integer("max_batch", kind.max_batch),
        load_format=section.choice("load_format", "auto", ("auto", "dummy")),
        options=section.mapping("options"),
        scheduling=choices.get("scheduling", ORDERS[0]),
    )
    return kind.resolve(of_every_stage, section, choices)


def _choice(section: Section, key: str, kind: EngineKind[Any]) -> str:
    """Return a stage's value of one of its kind's `choices`. A default applies only to kinds that have its value."""
    known = kind.choices[key]
    _, value = section.find(key)
    of_others = any(value in other.choices.get(key, ()) for other in kinds().values())
    if key not in section.values and value not in known and of_others:
        return known[0]
    return section.choice(key, known[0], known)


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
