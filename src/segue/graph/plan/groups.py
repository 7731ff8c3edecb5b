"""Decide which stages share a worker. `Place` says where a stage runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.graph.deployment.section import Section, wrong
from segue.graph.deployment.stage_plan import Scaling
from segue.graph.deployment.written import Wish, joined_wish, said_of_ranks
from segue.graph.parts import member_of
from segue.graph.stage_graph import StageGraph
from segue.messages.addresses import SERVER
from segue.messages.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage runs. Stages of one group differ in `memory_share` and `memory_bytes` only."""

    devices: tuple[str, ...]
    replicas: int
    threads: int
    memory_share: float
    memory_bytes: int
    ranks: int = 1
    """Processes of each replica; `memory_bytes` is for one of them."""
    routing: tuple[str, ...] = ("load",)
    nodes: tuple[str, ...] = (SERVER,)
    scaling: Scaling | None = None

    @property
    def most(self) -> int:
        """The most replicas that there may be."""
        return self.replicas if self.scaling is None else self.scaling.most


def groups_of(
    graph: StageGraph, sections: Mapping[str, Section], wishes: Mapping[str, Wish], apart: set[tuple[str, str]]
) -> tuple[tuple[str, ...], ...]:
    """Group the stages that the file fuses, then those that the graph suggests unless the file contradicts."""
    group_of: dict[str, tuple[str, ...]] = {name: (name,) for name in wishes}

    def fuse(name: str, other: str) -> None:
        members = {*group_of[name], *group_of[other]}
        group = tuple(member for member in wishes if member in members)
        group_of.update(dict.fromkeys(group, group))

    for name in wishes:
        other = _joined_with(graph, name, sections[name])
        if other is not None:
            _check_fusible(
                name, other, sections, joined_wish(group_of[name], wishes), joined_wish(group_of[other], wishes)
            )
            fuse(name, other)
    for name in wishes:
        suggested = graph.stages[name].fuse_with
        if suggested is None or sections[name].says("fuse_with"):
            continue
        members = {*group_of[name], *group_of[suggested]}
        clash = joined_wish(group_of[name], wishes).clash(joined_wish(group_of[suggested], wishes))
        if clash is None and not any(source in members and target in members for source, target in apart):
            fuse(name, suggested)
    for name in wishes:
        shared = graph.stages[name].shares_with
        if shared is not None and shared not in group_of[name]:
            _refuse_apart(graph.name, name, shared, *(joined_wish(group_of[one], wishes) for one in (name, shared)))
    return tuple(dict.fromkeys(group_of.values()))


def _refuse_apart(graph: str, name: str, shared: str, wish: Wish, theirs: Wish) -> None:
    """Raise `ConfigError` for a stage that the file sets apart from the one whose weights it uses."""
    key = wish.clash(theirs)
    remedy = (
        f"{name!r} has {key} {wish.shown()[key]} and {shared!r} has {theirs.shown()[key]}: give both the same"
        if key is not None
        else "leave out fuse_with of the stage, and the connector of their edge"
    )
    raise ConfigError(
        f"stage {name!r} of {graph!r} uses the weights and the cache of stage {shared!r}, so one worker has both; "
        f"{remedy}",
        field=f"stages.{name}.{key or 'fuse_with'}",
    )


def _joined_with(graph: StageGraph, name: str, section: Section) -> str | None:
    path, other = section.find("fuse_with")
    if other is None:
        return None
    if not isinstance(other, str):
        raise wrong(path, other, "the name of a stage")
    if other not in graph.stages:
        hint = nearest(other, [stage for stage in graph.stages if stage != name])
        raise ConfigError(f"{path} is {other!r}, which is no stage of {graph.name!r}{hint}", field=path)
    if member_of(other) != member_of(name):
        if "fuse_with" in section.values:
            raise wrong(path, other, f"a stage of {member_of(name)!r}: a worker has stages of one model")
        return None
    if other == name:
        if "fuse_with" in section.values:
            raise wrong(path, other, "another stage")
        return None  # `defaults` fuse all other stages with this one
    return other


def _check_fusible(name: str, other: str, sections: Mapping[str, Section], mine: Wish, theirs: Wish) -> None:
    key = mine.clash(theirs)
    if key is not None:
        path, _ = sections[name].find("fuse_with")
        raise ConfigError(
            f"{path} is {other!r}, but {name!r} has {key} {mine.shown()[key]} and {other!r} has {theirs.shown()[key]}; "
            f"fused stages share a worker, so they must agree",
            field=path,
        )


def check_alone(group: tuple[str, ...], wish: Wish, sections: Mapping[str, Section]) -> None:
    """Raise `ConfigError` if a worker of several processes has more than one stage."""
    if wish.ranks and len(group) > 1:
        path, said = said_of_ranks(group, sections)
        raise ConfigError(
            f"{said} is {wish.ranks}, but {' and '.join(map(repr, group))} share a worker; set their fuse_with to null",
            field=path,
        )
