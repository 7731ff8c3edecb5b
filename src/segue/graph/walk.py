"""Find the stages that run for a request: backward from its requested modalities, forward from its media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from segue.graph.parts import INPUT, OUTPUT, TOKENS, Edge, OutputCondition, Stage, full_name
from segue.messages.errors import InvalidRequest, nearest
from segue.messages.request import MediaPart, Request


@dataclass(frozen=True, slots=True)
class WalkStage:
    """One stage of a walk; it refers to stages of the same walk by name."""

    upstreams: frozenset[str]
    """Stages whose chunks this one receives."""
    downstreams: frozenset[str]
    """Stages that wait for this one's chunks."""
    to_client: frozenset[str]
    """The requested modalities that the client gets from this stage."""
    encoded: frozenset[str] = frozenset()
    """The requested modalities that this stage gives and the client gets as files, from `OUTPUT`."""
    on: Mapping[str, OutputCondition] = field(default_factory=dict)
    """Stages to which an edge leads that is taken only after some outcomes → the condition."""
    returns: Mapping[str, int] = field(default_factory=dict)
    """Stages that are visited again after this one → how often a request may return on that edge."""


Walk = dict[str, WalkStage]
"""The stages of one request by name, each after its upstreams."""


def walk(request: Request, stages: Sequence[Stage], edges: Sequence[Edge]) -> Walk:
    """Return the walk of a request over `stages`, in topological order.

    A stage can run if it is the input stage, or if an edge whose condition holds leads to it from a stage that can run;
    a stage that takes media but no text also needs its media in the request. The walk has those of them that the
    request needs: the stages that give a requested modality, and all their upstreams; those on the way back to one of
    them; and the output stage, if the request names formats. A request that asks only for `tokens` ends at the input
    stage.

    It is what a request may visit. `segue.graph.course` says what it does, from the outcomes of visits.
    """
    wanted = _wanted(request, stages)
    kinds = request.media_kinds()
    _check_media(request, stages)
    present = [edge for edge in edges if edge.when is None or edge.when(request)]
    upstreams: dict[str, frozenset[str]] = {}
    for stage in stages:
        arriving = (edge.source for edge in present if edge.target == stage.name and edge.most is None)
        before = frozenset(source for source in arriving if source in upstreams)
        has_media = not stage.media_only or bool(stage.takes & kinds)
        if stage.name == INPUT or (before and has_media):
            upstreams[stage.name] = before

    gives = {stage.name: stage.gives | {TOKENS} if stage.name == INPUT else stage.gives for stage in stages}
    able = frozenset().union(*(gives[name] for name in upstreams))
    if missing := sorted(wanted - able):
        raise InvalidRequest(
            f"modalities has {missing[0]!r}, which this model cannot make from this request alone{_why(stages)}",
            field="modalities",
        )
    files = wanted & request.formats.keys()
    encoded = {stage.name: stage.gives & files for stage in stages}
    only_files = files - set(request.raw)
    to_client = {name: (given & wanted) - only_files for name, given in gives.items()}
    to_client |= {OUTPUT: files} if files else {}
    needed: set[str] = set()
    while True:
        for stage in reversed(stages):
            if stage.name in upstreams and (to_client[stage.name] or encoded[stage.name] or stage.name in needed):
                needed |= {stage.name} | upstreams[stage.name]
        closing = [edge for edge in present if edge.most is not None and edge.target in needed]
        back = {edge.source for edge in closing if edge.source in upstreams}
        if back <= needed:
            break
        needed |= back
    return {
        stage.name: WalkStage(
            upstreams=upstreams[stage.name],
            downstreams=frozenset(other for other in needed if stage.name in upstreams[other]),
            to_client=to_client[stage.name],
            encoded=encoded[stage.name],
            on={edge.target: edge.on for edge in _leaving(stage.name, present, needed) if edge.on is not None},
            returns={edge.target: edge.most for edge in _leaving(stage.name, present, needed) if edge.most is not None},
        )
        for stage in stages
        if stage.name in needed
    }


def _leaving(name: str, present: Sequence[Edge], needed: set[str]) -> list[Edge]:
    return [edge for edge in present if edge.source == name and edge.target in needed]


def renamed(walk: Walk, member: str) -> Walk:
    """Return the walk of one model with the names that its stages have in a graph of models."""
    return {
        full_name(member, name): WalkStage(
            upstreams=frozenset(full_name(member, one) for one in stage.upstreams),
            downstreams=frozenset(full_name(member, one) for one in stage.downstreams),
            to_client=stage.to_client,
            encoded=stage.encoded,
            on={full_name(member, one): condition for one, condition in stage.on.items()},
            returns={full_name(member, one): most for one, most in stage.returns.items()},
        )
        for name, stage in walk.items()
    }


def _wanted(request: Request, stages: Sequence[Stage]) -> frozenset[str]:
    gives = frozenset().union(*(stage.gives for stage in stages))
    if not request.modalities:
        raise InvalidRequest(
            f"modalities is empty; this model gives {', '.join(sorted(gives))}",
            field="modalities",
        )
    for modality in request.modalities:
        if modality != TOKENS and modality not in gives:
            raise InvalidRequest(
                f"modalities has {modality!r}; this model gives {', '.join(sorted(gives))}{_suggest(modality, gives)}",
                field="modalities",
            )
    return frozenset(request.modalities)


def _suggest(name: str, known: frozenset[str]) -> str:
    """Return only the "did you mean" of `nearest`: the message already lists the known names."""
    hint = nearest(name, known)
    return hint if hint.startswith("; did you mean") else ""


def _check_media(request: Request, stages: Sequence[Stage]) -> None:
    takes = frozenset().union(*(stage.takes for stage in stages))
    for number, message in enumerate(request.messages):
        for place, part in enumerate(message.content):
            if isinstance(part, MediaPart) and part.kind not in takes:
                field = part.field or f"messages[{number}].content[{place}]"
                raise InvalidRequest(
                    f"{field} is {part.kind}; this model takes {', '.join(sorted(takes))}{_suggest(part.kind, takes)}",
                    field=field,
                )


def _why(stages: Sequence[Stage]) -> str:
    media = sorted(frozenset().union(*(stage.takes for stage in stages if stage.media_only)))
    return f"; it may need {', '.join(media)} in the request" if media else ""
