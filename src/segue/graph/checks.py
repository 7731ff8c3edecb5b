"""Validate a stage graph, find its main stage, and sort its stages topologically."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from segue.graph.kinds.registry import kinds
from segue.graph.parts import BUILT_IN, INPUT, OUTPUT, Edge, Stage
from segue.messages.errors import ConfigError, nearest
from segue.messages.tensors import DTYPES, TensorSpec

MODALITIES = ("text", "image", "audio", "video", "embedding", "score", "classes")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
"""Names appear in file keys, metric labels and diagrams; a leading digit could be mistaken for a stage number."""


def check(graph: str, stages: Sequence[Stage], edges: Sequence[Edge], tensors: Sequence[TensorSpec] = ()) -> None:
    """Raise `ConfigError` for the first mistake in the graph called `graph`."""
    taken = frozenset().union(*(stage.takes for stage in stages))
    for spec in tensors:
        _check_tensor(graph, spec, [other.name for other in tensors], taken)
    for stage in stages:
        _check_stage(graph, stage, {other.name for other in stages}, [spec.name for spec in tensors])
    _check_duplicates(graph, stages)
    _check_edges(graph, {stage.name for stage in stages}, edges)
    topological(graph, [stage.name for stage in stages], edges)  # raises if there is a cycle
    check_loops(graph, [stage.name for stage in stages], edges)
    _check_shared(graph, stages, edges)
    _check_flow(graph, stages, edges)
    main_stage(graph, stages)


def main_stage(graph: str, stages: Sequence[Stage]) -> str:
    """Return the stage marked `main`, else the one that gives text, else the only one that gives anything."""
    outputs = [stage for stage in stages if stage.gives]
    marked = [stage for stage in stages if stage.main]
    if len(marked) > 1:
        raise ConfigError(f"graph {graph!r} marks {_names(marked)} as main; only one stage makes the main output")
    if marked and not marked[0].gives:
        raise ConfigError(f"graph {graph!r}: stage {marked[0].name!r} is marked main, but gives nothing to the client")
    candidates = marked or [stage for stage in outputs if "text" in stage.gives] or outputs
    if len(candidates) > 1:
        raise ConfigError(
            f"graph {graph!r}: any of {_names(candidates)} could make the main output; mark one with main=True"
        )
    return candidates[0].name


def topological(graph: str, names: Sequence[str], edges: Sequence[Edge]) -> tuple[str, ...]:
    """Sort names so that each follows its upstreams, otherwise in the given order. Edges with a bound return and do
    not count; a cycle of others raises `ConfigError`."""
    waits_for = {name: {edge.source for edge in edges if edge.target == name and edge.most is None} for name in names}
    order: list[str] = []
    while waits_for:
        ready = next((name for name, sources in waits_for.items() if sources <= set(order)), None)
        if ready is None:
            cycle = " -> ".join(_cycle(waits_for))
            raise ConfigError(
                f"graph {graph!r} has a cycle: {cycle}; it must be a DAG, but for edges that return: say with "
                "most= how often a request may take such an edge"
            )
        order.append(ready)
        del waits_for[ready]
    return tuple(order)


def reachable(start: str, steps: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return `start` and all names that can be reached from it."""
    seen = {start}
    frontier = [start]
    while frontier:
        new = [name for name in steps.get(frontier.pop(), ()) if name not in seen]
        seen.update(new)
        frontier.extend(new)
    return frozenset(seen)


def check_loops(graph: str, names: Sequence[str], edges: Sequence[Edge]) -> None:
    """Check the edges between `names` that return. All other edges form a DAG, so a request ends once it has taken each
    of these as often as it may."""
    forward = {name: [edge.target for edge in edges if edge.source == name and edge.most is None] for name in names}
    closing = [edge for edge in edges if edge.most is not None]
    for edge in closing:
        where = f"graph {graph!r}: edge {edge.source!r} -> {edge.target!r}"
        if not isinstance(edge.most, int) or isinstance(edge.most, bool) or edge.most < 1:
            raise ConfigError(f"{where} has most={edge.most!r}; it must be a whole number of at least 1")
        if edge.source not in reachable(edge.target, forward):
            raise ConfigError(
                f"{where} has most={edge.most}, but closes no loop: no way leads from {edge.target!r} to "
                f"{edge.source!r}; leave most= out"
            )
        if edge.target != closing[0].target:
            first = closing[0]
            raise ConfigError(
                f"{where} returns to {edge.target!r}, but {first.source!r} -> {first.target!r} to {first.target!r}; "
                f"all loops of a graph must return to one place"
            )
    if not closing:
        return
    head = closing[0].target
    again = reachable(head, forward)
    for edge in edges:
        if edge.source not in again and edge.target in again - {head}:
            raise ConfigError(
                f"graph {graph!r}: edge {edge.source!r} -> {edge.target!r} enters what is visited again "
                f"after {head!r}, and would have nothing for their later visits; lead it to {head!r} instead"
            )


def _check_tensor(graph: str, spec: TensorSpec, names: Sequence[str], taken: frozenset[str]) -> None:
    where = f"graph {graph!r}: tensor {spec.name!r}"
    if not _NAME.fullmatch(spec.name) or spec.name in MODALITIES or names.count(spec.name) > 1:
        raise ConfigError(f"{where}: a name is a letter, then letters, digits, - and _; each differs from modalities")
    if spec.dtype not in DTYPES:
        raise ConfigError(f"{where} has dtype {spec.dtype!r}{nearest(spec.dtype, DTYPES)}")
    if not all(size is None or size > 0 for size in spec.shape):
        raise ConfigError(f"{where} has shape {spec.shape}; each size is at least 1, or None for any")
    if spec.tokens != 1 and spec.shape[:1] != (spec.tokens,):
        raise ConfigError(f"{where} has {spec.tokens} tokens; it must be 1, or the size of the first axis")
    if spec.most < 1:
        raise ConfigError(f"{where} has most={spec.most}; it must be at least 1")
    if spec.name not in taken:
        raise ConfigError(f"{where} is taken by no stage; name it in takes= of one")


def _check_stage(graph: str, stage: Stage, names: set[str], tensors: Sequence[str]) -> None:
    where = f"graph {graph!r}: stage {stage.name!r}"
    if not _NAME.fullmatch(stage.name):
        raise ConfigError(f"{where}: a name must be a letter, then letters, digits, - and _")
    if stage.engine not in kinds():
        raise ConfigError(f"{where} has engine {stage.engine!r}{nearest(stage.engine, kinds())}")
    inputs = (*MODALITIES, *tensors)
    for verb, modalities, known in (("takes", stage.takes, inputs), ("gives", stage.gives, MODALITIES)):
        for modality in sorted(modalities):
            if modality not in known:
                raise ConfigError(f"{where} {verb} {modality!r}{nearest(modality, known)}")
    if stage.fuse_with == stage.name:
        raise ConfigError(f"{where} has fuse_with {stage.name!r}, itself; name another stage")
    if stage.fuse_with is not None and stage.fuse_with not in names:
        raise ConfigError(f"{where} has fuse_with {stage.fuse_with!r}{nearest(stage.fuse_with, names - {stage.name})}")


def _check_shared(graph: str, stages: Sequence[Stage], edges: Sequence[Edge]) -> None:
    """Check that stages share the weights of stages upstream, which are built first."""
    before = {stage.name: [edge.source for edge in edges if edge.target == stage.name] for stage in stages}
    for stage in stages:
        upstream = reachable(stage.name, before) - {stage.name}
        if stage.shares_with is not None and stage.shares_with not in upstream:
            raise ConfigError(
                f"graph {graph!r}: stage {stage.name!r} has shares_with {stage.shares_with!r}; name a stage upstream "
                f"of it: {', '.join(sorted(upstream))}"
            )


def _check_duplicates(graph: str, stages: Sequence[Stage]) -> None:
    seen: set[str] = set()
    for stage in stages:
        if stage.name in seen and stage.name in BUILT_IN:
            raise ConfigError(f"graph {graph!r}: it already has a stage {stage.name!r} of its own; choose another name")
        if stage.name in seen:
            raise ConfigError(f"graph {graph!r} has two stages called {stage.name!r}; names must differ")
        seen.add(stage.name)


def _check_edges(graph: str, names: set[str], edges: Sequence[Edge]) -> None:
    seen: set[tuple[str, str]] = set()
    for edge in edges:
        where = f"graph {graph!r}: edge {edge.source!r} -> {edge.target!r}"
        for end in (edge.source, edge.target):
            if end not in names:
                raise ConfigError(f"{where} names no stage {end!r} of this graph{nearest(end, names)}")
        if edge.source == edge.target:
            raise ConfigError(f"{where} connects a stage to itself")
        if edge.target == INPUT:
            raise ConfigError(f"{where}: no edge may lead to {INPUT!r}, which reads the request")
        if (edge.source, edge.target) in seen:
            raise ConfigError(f"{where} is declared twice")
        seen.add((edge.source, edge.target))


def _check_flow(graph: str, stages: Sequence[Stage], edges: Sequence[Edge]) -> None:
    """Check that every stage is reachable from the request and leads to the client. Expects a DAG, and edges that
    return."""
    forward = {stage.name: [edge.target for edge in edges if edge.source == stage.name] for stage in stages}
    has_upstream = {edge.target for edge in edges if edge.most is None}
    if not any(stage.gives for stage in stages):
        raise ConfigError(f"graph {graph!r}: no stage gives anything to the client; set gives= of the last one")
    # in a DAG every unreachable stage is downstream of a stage that has no input at all
    for stage in stages:
        if stage.name != INPUT and stage.name not in has_upstream:
            below = sorted(reachable(stage.name, forward) - {stage.name, OUTPUT} - reachable(INPUT, forward))
            tail = f"; so {', '.join(map(repr, below))} cannot be reached from {INPUT!r} either" if below else ""
            raise ConfigError(
                f"graph {graph!r}: stage {stage.name!r} has no input: it takes nothing and no edge leads to it, "
                f"so it cannot be reached from {INPUT!r}{tail}"
            )
    giving = {OUTPUT, *(stage.name for stage in stages if stage.gives)}
    for stage in reversed(stages):
        if not reachable(stage.name, forward) & giving:
            raise ConfigError(
                f"graph {graph!r}: stage {stage.name!r} gives nothing and leads to no stage that does; "
                f"set gives=, or add an edge from it"
            )


def _cycle(waits_for: Mapping[str, set[str]]) -> list[str]:
    """Return one cycle, as a list that ends with its first name. Every remaining name waits for another of them."""
    path = [next(iter(waits_for))]
    while True:
        before = next(name for name in waits_for if name in waits_for[path[-1]])
        if before in path:
            return [before, *reversed(path[path.index(before) :])]
        path.append(before)


def _names(stages: Sequence[Stage]) -> str:
    return ", ".join(repr(stage.name) for stage in stages)
