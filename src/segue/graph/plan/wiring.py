"""Choose the connector of each edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from segue.graph.deployment.deployment import REACH, ConnectorKind, EdgePlan, MiB
from segue.graph.deployment.section import Section, as_mapping, wrong
from segue.graph.deployment.written import Wire
from segue.graph.parts import is_input
from segue.graph.stage_graph import Edge, StageGraph
from segue.messages.errors import ConfigError, nearest

KINDS: dict[str, ConnectorKind] = {
    "SharedMemoryConnector": "shm",
    "InProcessConnector": "inproc",
    "TcpConnector": "tcp",
    "MooncakeConnector": "mooncake_store",
    "MooncakeStoreConnector": "mooncake_store",
    "MooncakeTransferEngineConnector": "mooncake_engine",
    "NixlConnector": "nixl",
}
"""Name in a deployment → kind of connector."""

_ELSEWHERE = frozenset(
    {
        "CudaIpcConnector",
        "MoriTransferEngineConnector",
        "YuanrongConnector",
        "YuanrongTransferEngineConnector",
    }
)
"""Connectors of vllm-omni's documentation that this version does not have."""

_BUDGET = 64 * MiB
_PAGE = 4096
_SIZES: Mapping[ConnectorKind, tuple[str, ...]] = {
    "shm": ("shm_threshold_bytes", "pool_bytes", "max_bytes", "cuda_pool_bytes"),
    "inproc": ("max_bytes",),
    "tcp": ("inline_threshold_bytes", "max_bytes"),
    "mooncake_engine": ("inline_threshold_bytes", "max_bytes"),
    "nixl": ("inline_threshold_bytes", "max_bytes"),
    "mooncake_store": ("inline_threshold_bytes", "max_bytes", "segment", "localbuf"),
}
_TEXTS: Mapping[ConnectorKind, tuple[str, ...]] = {
    "mooncake_engine": ("host", "protocol", "device_name"),
    "nixl": ("device_name",),
    "mooncake_store": ("host", "master", "metadata_server", "proto", "rdma"),
}
_FOREIGN: Mapping[ConnectorKind, tuple[str, ...]] = {
    "mooncake_engine": ("memory_pool_size", "memory_pool_device", "zmq_port"),
}
"""Keys of vllm-omni that mean something else here: see `_translated`."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A connector as the deployment defines it."""

    kind: ConnectorKind
    extra: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Connectors:
    """The connectors of a deployment, including the built-in ones."""

    known: Mapping[str, Definition]
    automatic: Mapping[ConnectorKind, str]
    """The connector of an edge for which the file names none."""

    def kind_of(self, wire: Wire) -> ConnectorKind | None:
        """Return the kind of a wire's connector; None if it names none."""
        return None if wire.connector is None else self.of(wire.path, wire.connector).kind

    def of(self, path: str, name: str) -> Definition:
        if name not in self.known:
            raise ConfigError(f"{path} is {name!r}, which is no connector{nearest(name, self.known)}", field=path)
        return self.known[name]


def define(sections: Mapping[str, Section]) -> Connectors:
    """Read the connectors of a file."""
    written = {name: _definition(section) for name, section in sections.items()}
    automatic: dict[ConnectorKind, str] = {"inproc": "inproc"}
    kinds: tuple[ConnectorKind, ...] = ("shm", "tcp")
    for kind in kinds:
        named = [name for name, definition in written.items() if definition.kind == kind]
        # the only connector of its kind in a file is meant for all edges, under any name
        automatic[kind] = named[0] if len(named) == 1 and kind not in written else kind
    built_in: dict[str, Definition] = {kind: Definition(kind, {}) for kind in automatic}
    return Connectors(known={**built_in, **written}, automatic=automatic)


def plan_edges(
    graph: StageGraph,
    connectors: Connectors,
    wires: Sequence[Wire],
    groups: Sequence[Sequence[str]],
    nodes: Mapping[str, Sequence[str]],
) -> tuple[EdgePlan, ...]:
    """Give every edge a connector that reaches from end to end: the file's, else the default of its kind. `nodes`: the
    hosts of every stage."""
    chosen = _merge(wires)
    plans = []
    for edge in graph.edges:
        fused = any(edge.source in group and edge.target in group for group in groups)
        hosts = {*nodes[edge.source], *nodes[edge.target]}
        kind: ConnectorKind = "inproc" if fused else "shm" if len(hosts) == 1 else "tcp"
        wire = chosen.get((edge.source, edge.target))
        path, name, budget = f"edge {edge.source} -> {edge.target}", connectors.automatic[kind], _BUDGET
        start, form = 1, "exact"
        if wire is not None:
            form = wire.wire or form
            path, name, budget = wire.path, wire.connector or name, wire.budget or budget
            start = wire.start or start
            if start > 1:
                _check_start(graph, edge, path)
        definition = connectors.of(path, name)
        if (definition.kind == "inproc") != (kind == "inproc") or (
            kind == "tcp" and REACH[definition.kind] != "network"
        ):
            _refuse(edge.source, edge.target, path, name, kind, hosts)
        if form != "exact" and REACH[definition.kind] != "network":
            raise ConfigError(
                f"{path}: wire is {form!r}, but the edge {edge.source} -> {edge.target} stays on one host and loses "
                "nothing; leave it out",
                field=path,
            )
        plans.append(EdgePlan(edge.source, edge.target, name, definition.kind, definition.extra, budget, start, form))
    return tuple(plans)


def _definition(section: Section) -> Definition:
    path, name = section.find("name")
    if not isinstance(name, str):
        raise wrong(path, name, f"one of {', '.join(KINDS)}")
    if name in _ELSEWHERE:
        raise ConfigError(
            f"{path} is {name!r}, which this version does not have; edges between processes of one machine are served "
            f"by SharedMemoryConnector",
            field=path,
        )
    if name not in KINDS:
        raise ConfigError(f"{path} is {name!r}, which is no connector{nearest(name, KINDS)}", field=path)
    kind = KINDS[name]
    extra_path, values = section.find("extra")
    sizes, texts = _SIZES[kind], _TEXTS.get(kind, ())
    extra = Section(extra_path, as_mapping(extra_path, values), (*sizes, *texts, *_FOREIGN.get(kind, ())))
    least = {"pool_bytes": _PAGE, "max_bytes": _PAGE}
    read = {key: extra.size(key, None, least=least.get(key, 0)) for key in sizes}
    written = {key: size for key, size in read.items() if size is not None}
    if written.get("max_bytes", math.inf) < written.get("pool_bytes", 0):
        raise wrong(extra.at("max_bytes"), written["max_bytes"], f"at least pool_bytes ({written['pool_bytes']})")
    for key in texts:
        if (value := extra.values.get(key)) is not None and not isinstance(value, str):
            raise wrong(extra.at(key), value, "text")
    said = {key: extra.values[key] for key in texts if extra.values.get(key) is not None}
    return Definition(kind, {**said, **_translated(extra), **written})


def _translated(extra: Section) -> dict[str, int]:
    """Return our settings for vllm-omni's keys of its MooncakeTransferEngineConnector. Its `zmq_port` is needed no
    more: the place of a payload travels with the messages."""
    if (device := extra.values.get("memory_pool_device")) not in (None, "cpu"):
        raise wrong(extra.at("memory_pool_device"), device, "cpu: payloads pass through the memory of the host")
    size = extra.size("memory_pool_size", None, least=_PAGE)
    return {} if size is None else {"max_bytes": size}


def _merge(wires: Sequence[Wire]) -> dict[tuple[str, str], Wire]:
    """Merge the wires of each edge into one; both ends may name the connector if they agree."""
    merged: dict[tuple[str, str], Wire] = {}
    for wire in wires:
        ends = (wire.source, wire.target)
        other = merged.get(ends)
        if other is None:
            merged[ends] = wire
            continue
        if other.path.startswith("edges") and wire.path.startswith("edges"):
            raise ConfigError(f"{wire.path}: edge {wire.source} -> {wire.target} is in the list twice", field=wire.path)
        if other.connector and wire.connector and other.connector != wire.connector:
            raise ConfigError(
                f"{wire.path} is {wire.connector!r}, but {other.path} is {other.connector!r}; "
                f"one edge has one connector",
                field=wire.path,
            )
        named = other if other.connector else wire
        merged[ends] = Wire(
            named.path,
            *ends,
            named.connector,
            other.budget or wire.budget,
            other.start or wire.start,
            other.wire or wire.wire,
        )
    return merged


def _check_start(graph: StageGraph, edge: Edge, path: str) -> None:
    """Raise `ConfigError` for an edge whose chunks other edges could have to wait for: a stage that waits for its first
    chunk consumes nothing, so theirs might never come."""
    after = {edge.target}
    for name in graph.topological():
        if name in after:
            after.update(graph.downstreams(name))
    for other in graph.edges:
        if other.target in after and other.source not in after and not is_input(other.source) and other != edge:
            raise ConfigError(
                f"edge {edge.source} -> {edge.target} cannot have a start: {other.target!r} also gets chunks from "
                f"{other.source!r}, which could wait for it for ever",
                field=path,
            )


def _refuse(source: str, target: str, path: str, name: str, kind: ConnectorKind, hosts: set[str]) -> NoReturn:
    why = {
        "inproc": f"{source!r} and {target!r} share a worker, so only an InProcessConnector serves the edge",
        "shm": f"{source!r} and {target!r} are different processes; use a SharedMemoryConnector, or fuse them",
        "tcp": f"{source!r} and {target!r} are on different hosts ({', '.join(sorted(hosts))}); use a TcpConnector",
    }[kind]
    raise ConfigError(f"{path} is {name!r}: {why}", field=path)
