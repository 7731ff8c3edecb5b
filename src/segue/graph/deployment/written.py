"""Bring a deployment file into one form, whichever of its formats it uses, without resolving defaults; and read what
it asks for about the placement of a stage or a group of stages (`Wish`).

Optional reading: reads a file as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from segue.graph.deployment.deployment import Hardware, Hosts, Limits, MovePolicy
from segue.graph.deployment.section import Section, as_mapping, size_of, wrong
from segue.graph.deployment.stage_plan import CPU, ROUTINGS, Scaling
from segue.graph.kinds.registry import kind_keys, kind_of, kinds, rank_keys
from segue.graph.parts import is_built_in, member_of, own_name
from segue.graph.stage_graph import StageGraph
from segue.messages.addresses import SERVER
from segue.messages.errors import ConfigError, nearest

TOP_KEYS = (
    "defaults",
    "stages",
    "stage_args",
    "edges",
    "connectors",
    "runtime",
    "limits",
    "moves",
    "nodes",
    "placement",
    "ray",
    "skip_tokenizer_init",
)
LIMIT_KEYS = tuple(field.name for field in fields(Limits))
MOVE_KEYS = tuple(field.name for field in fields(MovePolicy))
HOST_KEYS = ("cpus", "memory", "gpus")
SCALING_KEYS = ("min", "max", "queue_age", "idle", "cooldown")
_OF_EVERY_STAGE = (
    "devices",
    "replicas",
    "routing",
    "node",
    "memory_share",
    "dtype",
    "threads",
    "max_batch",
    "load_format",
    "fuse_with",
    "options",
)
WIRES = ("exact", "bfloat16")
"""How float32 tensors travel between hosts."""
_WIRING = ("input_connectors", "output_connectors", "engine_input_source")
_THE_GRAPHS = "nothing (the graph of the model says it)"
_FOREIGN = {
    "device": "devices",
    "default_sampling_params": "sampling",
    "enable_prefix_caching": "prefix_caching",
    "engine_args": "the keys of a stage (see segue.graph.deployment.deployment)",
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
    "runtime": "devices, max_batch",
    "parallel_config": "tensor_parallel and the like",
    "stage_type": _THE_GRAPHS,
    "model_stage": _THE_GRAPHS,
    "is_comprehension": _THE_GRAPHS,
    "final_output": _THE_GRAPHS,
    "final_output_type": _THE_GRAPHS,
    "custom_process_input_func": _THE_GRAPHS,
    "custom_process_next_stage_input_func": _THE_GRAPHS,
}
"""vllm-omni's key (its `docs/configuration/stage_configs.md`) → our key, for the error message."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One entry of the file about one edge."""

    path: str
    """Path of the connector's name, or of the entry if it names none."""
    source: str
    target: str
    connector: str | None
    budget: int | None
    start: int | None
    wire: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A deployment file in which every key is valid and every stage belongs to the graph."""

    stages: dict[str, Section]
    """Every stage of the graph; its section is empty if the file does not mention it, and falls back to `defaults`."""
    wires: list[Wire]
    connectors: dict[str, Section]
    limits: Section
    moves: Section | None
    defaults: Section
    """The caller's overrides over the file's `defaults`."""
    skip_tokenizer_init: bool
    ray: Section | None
    """None: `placement` is not ray."""
    hosts: dict[str, Hardware]
    """The nodes that it describes."""


def stage_keys() -> tuple[str, ...]:
    """Return the keys that a stage may have: those of every stage and those of each engine kind."""
    return (*_OF_EVERY_STAGE, *kind_keys())


def read(graph: StageGraph, values: object, overrides: Mapping[str, Any]) -> Written:
    """Sort a parsed file into sections. `overrides` are stage keys that override the file's `defaults`."""
    top = Section("", values, TOP_KEYS)
    defaults = Section("defaults", top.mapping("defaults"), stage_keys(), foreign=_FOREIGN)
    below = Section("overrides", overrides, stage_keys(), foreign=_FOREIGN, below=defaults)
    stages: dict[str, Section] = {}
    wires = list(_edges(graph, top))
    for name, path, entry, keys in _stage_entries(graph, top):
        if name in stages:
            raise ConfigError(f"{path} is stage {name!r}, as is {stages[name].path}; describe it once", field=path)
        # input and output stages run on the CPU without a network: defaults that are meant for networks do not apply
        without = graph.stages[name].without
        section = Section(path, entry, keys, below=None if is_built_in(name) else below, foreign=_FOREIGN, own=without)
        _check_engine(graph, name, section)
        wires.extend(_wiring(graph, name, section))
        stages[name] = section
    for name in graph.topological():
        own = graph.stages[name].without
        stages.setdefault(name, Section(f"stages.{name}", {}, (), below=None if is_built_in(name) else below, own=own))
    limits = Section("limits", top.mapping("limits"), LIMIT_KEYS)
    _, policy = top.find("moves")
    moves = None if policy is None else Section("moves", policy, MOVE_KEYS)
    skips = top.flag("skip_tokenizer_init", False)
    return Written(stages, wires, dict(_connectors(top)), limits, moves, below, skips, _ray(top), dict(_hosts(top)))


def _hosts(top: Section) -> Iterator[tuple[str, Hardware]]:
    """Yield what the file says of the hardware of other hosts."""
    for name, entry in top.mapping("nodes").items():
        section = Section(f"nodes.{name}", entry, HOST_KEYS)
        if name == SERVER:
            raise ConfigError(f"{section.path}: the host that `segue serve` runs on is looked at; leave it out")
        cpus, memory = section.integer("cpus", None), section.size("memory", None)
        if cpus is None or memory is None:
            raise ConfigError(f"{section.path} needs cpus and memory", field=section.path)
        sizes = [size_of(size) if isinstance(size, str) else size for _, size in section.entries("gpus")]
        if not all(type(size) is int and size > 0 for size in sizes):
            right = "a list of the GPUs' memory, such as [24GiB, 24GiB]"
            raise wrong(section.at("gpus"), section.values["gpus"], right)
        yield name, Hardware(cpus, memory, tuple(size for size in sizes if size))


def _ray(top: Section) -> Section | None:
    by_ray = top.choice("placement", "join", ("join", "ray")) == "ray"
    path, found = top.find("ray")
    if found is not None and not by_ray:
        raise ConfigError("ray is set, but placement is not ray", field=path)
    return Section("ray", top.mapping("ray"), ("address", "nodes")) if by_ray else None


def _stage_entries(graph: StageGraph, top: Section) -> Iterator[tuple[str, str, object, tuple[str, ...]]]:
    """Yield (stage, path, entry, allowed keys) of every stage in the file."""
    _, written = top.find("stages")
    if not isinstance(written, list):
        for written_name, entry in top.mapping("stages").items():
            name = _of_member(graph, written_name)
            if name not in graph.stages:
                raise ConfigError(
                    f"stages has {name!r}, which is no stage of {graph.name!r}{nearest(name, graph.stages)}",
                    field=f"stages.{name}",
                )
            yield name, f"stages.{written_name}", entry, (*stage_keys(), *_WIRING)
    for key in ("stages", "stage_args"):
        if key == "stage_args" or isinstance(written, list):
            for path, entry in top.entries(key):
                fields = as_mapping(path, entry)
                yield (
                    _named_stage(graph, path, fields),
                    path,
                    fields,
                    (*stage_keys(), *_WIRING, "stage_id", "stage_name"),
                )


def _of_member(graph: StageGraph, name: str) -> str:
    """Return the full name of a stage of a graph of models: a model that has a single stage of its own
    stands for it. Raises `ConfigError`."""
    place = name.partition(".")[0]
    if (model := graph.places.get(place, place)) != place:
        raise ConfigError(
            f"stages has {name!r}, but {place!r} reuses the model {model!r}: name that", field=f"stages.{name}"
        )
    if name not in graph.members:
        return name
    stages = [stage for stage in graph.stages if member_of(stage) == name and not is_built_in(stage)]
    if len(stages) > 1:
        raise ConfigError(
            f"stages has {name!r}, a model of {graph.name!r} with several stages; name one: {', '.join(stages)}",
            field=f"stages.{name}",
        )
    return stages[0]


def _named_stage(graph: StageGraph, path: str, entry: Mapping[str, Any]) -> str:
    """Return the stage that a list entry names by `stage_name`, `stage_id`, or both."""
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
    """Return the stage of a name or number. Numbers count the stages from 0 in topological order without `input` and
    `output`."""
    counted = [name for name in graph.topological() if not is_built_in(name)]
    if isinstance(value, str) and (name := _of_member(graph, value)) in graph.stages:
        return name
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is int and 0 <= number < len(counted):
        return counted[number]
    if isinstance(value, str) and not value.isdecimal():
        raise ConfigError(
            f"{path} is {value!r}, which is no stage of {graph.name!r}{nearest(value, graph.stages)}", field=path
        )
    raise wrong(path, value, f"a stage: {', '.join(f'{place} ({name})' for place, name in enumerate(counted))}")


def _check_engine(graph: StageGraph, name: str, section: Section) -> None:
    """Raise `ConfigError` if a key of a stage's own section belongs to another engine, or the stage does not support
    it."""
    engine = graph.stages[name].engine
    for key, value in section.values.items():
        if key in graph.stages[name].without and value is not None:
            raise ConfigError(
                f"{section.at(key)} is set, but stage {name!r} of {graph.name!r} does not support it; leave it out",
                field=section.at(key),
            )
        having = [kind.name for kind in kinds().values() if key in kind.keys]
        if having and engine not in having:
            raise ConfigError(
                f"{section.at(key)} is for {' and '.join(having)} stages; {name!r} has the {engine} engine",
                field=section.at(key),
            )


def _edges(graph: StageGraph, top: Section) -> Iterator[Wire]:
    for path, entry in _runtime(top).entries("edges"):  # vllm-omni's: they say what the graph says
        section = Section(path, entry, ("from", "to", "window_size"))
        _only(section, "window_size", -1)
        _ends(graph, section)
    for path, entry in top.entries("edges"):
        section = Section(path, entry, ("from", "to", "connector", "budget", "start", "wire"))
        ends = _ends(graph, section)
        connector = _connector_name(*section.find("connector"))
        where = section.at("connector") if connector else path
        wire = None if section.values.get("wire") is None else section.choice("wire", "", WIRES)
        budget, start = section.size("budget", None), section.integer("start", None)
        yield Wire(where, *ends, connector, budget, start, wire)


def _ends(graph: StageGraph, section: Section) -> tuple[str, str]:
    """Return source and target of an edge of the graph."""
    ends = []
    for key in ("from", "to"):
        _, value = section.find(key)
        if value is None:
            raise ConfigError(f"{section.path} has no {key!r}; an edge needs from and to", field=section.at(key))
        ends.append(stage_of(graph, section.at(key), value))
    _check_edge(graph, section.path, ends[0], ends[1])
    return ends[0], ends[1]


def _runtime(top: Section) -> Section:
    """Return the section `runtime`. Besides `connectors`, it may have those keys of vllm-omni's that change nothing."""
    runtime = Section("runtime", top.mapping("runtime"), ("connectors", "edges", "enabled", "defaults"))
    _only(runtime, "enabled", True)
    defaults = Section("runtime.defaults", runtime.mapping("defaults"), ("window_size", "max_inflight"))
    _only(defaults, "window_size", -1)
    _only(defaults, "max_inflight", 1)
    return runtime


def _only(section: Section, key: str, value: object) -> None:
    """Raise `ConfigError` if a key of vllm-omni has another value than the one that changes nothing."""
    path, found = section.find(key)
    if found is not None and found != value:
        instead = "`budget` of an edge bounds what is on its way, `max_batch` what a stage does at a time"
        raise ConfigError(f"{path} is {found!r}; only {value!r} is understood: {instead}", field=path)


def _wiring(graph: StageGraph, stage: str, section: Section) -> Iterator[Wire]:
    """Yield the edges in `input_connectors` and `output_connectors` of a stage."""
    for path, source in section.entries("engine_input_source"):
        _check_edge(graph, path, stage_of(graph, path, source), stage)
    for key, prefix in (("input_connectors", "from_stage_"), ("output_connectors", "to_stage_")):
        for name, value in section.mapping(key).items():
            path = f"{section.at(key)}.{name}"
            if not name.startswith(prefix):
                raise ConfigError(f"{path}: keys of {key} must look like {prefix}<stage>", field=path)
            other = stage_of(graph, path, name.removeprefix(prefix))
            source, target = (other, stage) if prefix == "from_stage_" else (stage, other)
            _check_edge(graph, path, source, target)
            yield Wire(path, source, target, _connector_name(path, value), None, None)


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
    runtime = _runtime(top)
    seen: dict[str, str] = {}
    for place in (runtime, top):
        for name, entry in place.mapping("connectors").items():
            path = f"{place.at('connectors')}.{name}"
            if name in seen:
                raise ConfigError(f"{path} is defined twice; the other is {seen[name]}", field=path)
            seen[name] = path
            yield name, Section(path, entry, ("name", "extra"))


MOST_THREADS = 1024
"""Most threads of a worker: the threading runtime dies with many more."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The placement that the file asks for, for a stage or a group of stages; None: not set."""

    devices: tuple[str, ...] | None
    replicas: int | None
    threads: int | None
    ranks: int | None
    routing: tuple[str, ...] | None = None
    nodes: tuple[str, ...] | None = None
    scaling: Scaling | None = None
    """Set: `replicas` is its least number."""

    def shown(self) -> dict[str, str]:
        """Return the set fields as text."""
        number = self.replicas if self.scaling is None else as_text(self.scaling)
        said = {"devices": ", ".join(self.devices or ()), "replicas": number, "threads": self.threads}
        said["processes per replica"] = self.ranks
        said["routing"] = ", ".join(self.routing or ())
        said["node"] = ", ".join(self.nodes or ())
        return {key: str(value) for key, value in said.items() if value}

    def clash(self, other: Wish) -> str | None:
        """Return a key on which the two disagree, or None."""
        mine, theirs = self.shown(), other.shown()
        return next((key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]), None)

    def join(self, other: Wish) -> Wish:
        return Wish(
            self.devices or other.devices,
            self.replicas or other.replicas,
            self.threads or other.threads,
            self.ranks or other.ranks,
            self.routing or other.routing,
            self.nodes or other.nodes,
            self.scaling or other.scaling,
        )


def joined_wish(group: Sequence[str], wishes: Mapping[str, Wish]) -> Wish:
    wish = wishes[group[0]]
    for name in group[1:]:
        wish = wish.join(wishes[name])
    return wish


def wish_of(graph: StageGraph, name: str, section: Section, hosts: Hosts) -> Wish:
    devices = _devices(section, hosts)
    if is_built_in(name):
        if devices not in (None, (CPU,)):
            right = f"cpu: the {own_name(name)} stage runs on the CPU"
            raise wrong(section.at("devices"), section.values["devices"], right)
        devices = (CPU,)
    stage = graph.stages[name]
    ranks = kind_of(stage.engine).ranks(graph.name, stage, section)
    threads = section.integer("threads", None, most=MOST_THREADS)
    routing = section.choices("routing", None, ROUTINGS)
    scaling = _scaling(section)
    replicas = section.integer("replicas", None) if scaling is None else scaling.least
    if scaling is not None and is_built_in(name):
        path, value = section.find("replicas")
        raise wrong(path, value, f"a number: the workers of the {own_name(name)} stage are always the same")
    return Wish(devices, replicas, threads, ranks, routing, _nodes(section), scaling)


def as_text(scaling: Scaling) -> str:
    """Return a range of replicas as a deployment writes it."""
    return "{" + ", ".join(f"{key}: {value:g}" for key, value in zip(SCALING_KEYS, astuple(scaling), strict=True)) + "}"


def _scaling(section: Section) -> Scaling | None:
    """Read a range of replicas; None: `replicas` is a number, or not set."""
    path, value = section.find("replicas")
    if not isinstance(value, Mapping):
        return None
    said = Section(path, value, SCALING_KEYS)
    for key in ("max", "queue_age"):
        if said.values.get(key) is None:
            raise ConfigError(f"{path} has no {key!r}; a range needs max and queue_age", field=said.at(key))
    least = said.integer("min", 1)
    most = said.integer("max", 1, least=least)
    age, default = said.number("queue_age", 0.0), Scaling(1, 1, 1.0)
    idle, cooldown = said.number("idle", default.idle), said.number("cooldown", default.cooldown)
    return Scaling(least, most, age, idle, cooldown)


def said_of_ranks(group: tuple[str, ...], sections: Mapping[str, Section]) -> tuple[str, str]:
    """Return the path of the first key that gives a replica of a group several processes, and all such keys as text."""
    said = [(key, *sections[name].find(key)) for key in reversed(rank_keys()) for name in group]
    keys, paths = zip(*((key, path) for key, path, value in said if value not in (None, 1)), strict=True)
    return paths[0], " x ".join([paths[0], *keys[1:]])


def path_of(key: str, group: tuple[str, ...], sections: Mapping[str, Section]) -> str:
    """Return the path of a group's key."""
    return next(path for name in group for path, value in [sections[name].find(key)] if value is not None)


def _nodes(section: Section) -> tuple[str, ...] | None:
    path, value = section.find("node")
    if value is None:
        return None
    names = value if isinstance(value, list) else [value]
    right = f"the name of a node, of letters, digits, - and _ ({SERVER!r}: the server's own host), or a list of them"
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,63}", name) for name in names):
        raise wrong(path, value, right)
    if len(set(names)) < len(names):
        raise wrong(path, value, f"{right}, each once")
    return tuple(names)


def _devices(section: Section, hosts: Hosts) -> tuple[str, ...] | None:
    path, value = section.find("devices")
    if value is None or value == "auto":
        return None
    devices = value if isinstance(value, list) else [value]
    right = "'auto', 'cpu', 'cuda:N', or a list of devices of one kind"
    if not devices or not all(isinstance(device, str) for device in devices):
        raise wrong(path, value, right)
    for node in _nodes(section) or (SERVER,):
        for device in devices:
            _check_device(path, device, node, hosts)
    if len(set(devices)) < len(devices) or (CPU in devices and len(devices) > 1):
        raise wrong(path, value, f"{right}, each once")
    return tuple(devices)


def _check_device(path: str, device: str, node: str, hosts: Hosts) -> None:
    """Raise `ConfigError` for a device that a host does not have."""
    hardware = hosts.of(node)
    known = (CPU, *(f"cuda:{number}" for number in range(len(hardware.gpus))))
    if device in known:
        return
    has = f"{len(hardware.gpus)} GPUs" if hardware.gpus else "no GPU"
    where = f"this machine has {has}"
    if node in hosts.nodes:
        where = f"node {node!r} has {has} (nodes.{node})"
    elif node != SERVER:
        where = f"this machine has {has}, and nodes does not say that node {node!r} has more"
    elif hardware.gpu_notes:
        where = f"this process can use {has} ({'; '.join(hardware.gpu_notes)})"
    raise ConfigError(f"{path} names {device!r}, but {where}{nearest(device, known)}", field=path)
