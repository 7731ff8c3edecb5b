"""Render a graph or a plan as text or as a Mermaid diagram.

Optional reading: for people who look at a graph or a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from segue.graph.deployment.deployment import MiB, Plan
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.parts import INPUT, full_name, is_built_in
from segue.graph.stage_graph import Edge, Stage, StageGraph


def as_text(what: Plan | StageGraph) -> str:
    """Return tables of stages and edges. Stages are in topological order, with their `stage_id`."""
    graph = what.graph if isinstance(what, Plan) else what
    order = graph.topological()
    number = {name: str(place) for place, name in enumerate(name for name in order if not is_built_in(name))}
    head = ["", "stage", "engine", "takes", "gives"]
    rows = [
        [number.get(name, ""), name, stage.engine, _list(stage.takes), _list(stage.gives)]
        for name, stage in ((name, graph.stages[name]) for name in order)
    ]
    if isinstance(what, Plan):
        head += ["devices", "replicas", "memory", "dtype", "threads", "batch", "worker with"]
        for row, name in zip(rows, order, strict=True):
            row += _placed(what.stages[name], what.group_of(name))
        if what.nodes():
            head.append("node")
            for row, name in zip(rows, order, strict=True):
                row.append(", ".join(what.stages[name].node))
    if any(graph.stages[name].library for name in order):
        head.append("runs of a library")
        for row, name in zip(rows, order, strict=True):
            row.append(graph.stages[name].library or "-")
    lines = [
        f"{graph.name}: takes {_list(graph.takes)}; gives {_list(graph.gives)}; main output from {graph.main}",
        "",
        *table([head, *rows]),
        "",
        *table(_edge_rows(what)),
    ]
    if graph.links:
        lines += ["", *table(_link_rows(graph))]
    if graph.tensors:
        lines += ["", *(f"tensor {spec}" for spec in graph.tensors.values())]
    return "\n".join(lines) + "\n"


def as_mermaid(what: Plan | StageGraph) -> str:
    """Return a flowchart; edges that return or have a condition are dotted and labelled, stages that share a worker are
    framed."""
    graph = what.graph if isinstance(what, Plan) else what
    groups = what.groups if isinstance(what, Plan) else tuple((name,) for name in graph.topological())
    # generated ids: a stage may be called `end`, which is a keyword of Mermaid
    ids = {name: f"s{place}" for place, name in enumerate(graph.topological())}
    lines = ["flowchart LR"]
    for place, group in enumerate(groups):
        nodes = [f'{ids[name]}["{_label(graph.stages[name], what)}"]' for name in group]
        if len(group) == 1:
            lines.append(f"    {nodes[0]}")
        else:
            lines += [f'    subgraph w{place}["one worker"]', *(f"        {node}" for node in nodes), "    end"]
    for edge in graph.edges:
        arrow = f"-. {edge.condition} .->" if edge.condition else "-->"
        lines.append(f"    {ids[edge.source]} {arrow} {ids[edge.target]}")
    for link in graph.links:
        source = graph.giver(graph.places[link.source], link.carries)
        label = f"{link.carries}, {link.condition}" if link.condition else link.carries
        lines.append(f"    {ids[source]} == {label} ==> {ids[full_name(graph.places[link.target], INPUT)]}")
    for name in graph.outputs:
        for modality in sorted(graph.stages[name].gives):
            lines.append(f"    {ids[name]} --> {ids[name]}_{modality}([{modality}])")
    return "\n".join(lines) + "\n"


def _placed(stage: StagePlan, group: Sequence[str]) -> list[str]:
    others = [name for name in group if name != stage.name]
    memory = f"{stage.memory_share:.1%}" if stage.memory_share else "-"
    return [
        _list(stage.devices),
        _number(stage),
        memory,
        stage.dtype,
        str(stage.threads),
        str(stage.max_batch),
        _list(others),
    ]


def _number(stage: StagePlan) -> str:
    """Return how many replicas a stage has."""
    return str(stage.replicas) if stage.scaling is None else f"{stage.scaling.least} to {stage.scaling.most}"


def _edge_rows(what: Plan | StageGraph) -> list[list[str]]:
    if isinstance(what, StageGraph):
        return [["edge", "when"], *([_arrow(edge), edge.condition or "-"] for edge in what.edges)]
    rows = [["edge", "when", "connector", "kind", "budget"]]
    for edge in what.graph.edges:
        plan = what.edge(edge.source, edge.target)
        rows.append(
            [_arrow(edge), edge.condition or "-", plan.connector, plan.kind, f"{plan.budget / MiB:g} MiB"],
        )
    return rows


def _link_rows(graph: StageGraph) -> list[list[str]]:
    at = {place: place if place == model else f"{place} ({model})" for place, model in graph.places.items()}
    rows = [
        [f"{at[link.source]} -> {at[link.target]}", link.carries, link.transform or "-", link.condition or "-"]
        for link in graph.links
    ]
    return [["model to model", "carries", "transform", "when"], *rows]


def _label(stage: Stage, what: Plan | StageGraph) -> str:
    parts = [stage.name, stage.engine]
    if stage.takes:
        parts.append(f"takes {_list(stage.takes)}")
    if stage.library:
        parts.append(stage.library)
    if isinstance(what, Plan):
        plan = what.stages[stage.name]
        parts.append(f"{_number(plan)} on {_list(plan.devices)}")
    return "<br>".join(parts)


def _arrow(edge: Edge) -> str:
    return f"{edge.source} -> {edge.target}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "-"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, its columns aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
