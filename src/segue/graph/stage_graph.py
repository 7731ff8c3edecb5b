"""The stage graph of one model, as a value: named stages, the edges between them, and a request's walk over them.

    g = StageGraph("speaking")
    g.stage("encoder", "module", takes={"image", "audio", "video"})
    g.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("talker", "autoregressive")
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("encoder", "thinker")
    g.edge("thinker", "talker")
    g.edge("talker", "vocoder")
    g.validate()

Every graph also has the stage `INPUT`: the family's processor, a CPU stage with an edge to every stage that takes
some modality of the request. One that gives audio, images or video also has the stage `OUTPUT`, a CPU stage that
makes files of them, with an edge from every stage that gives some. The graph knows no devices or processes; the
deployment (`segue.graph.deployment.deployment`) adds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Self

from segue.graph import checks
from segue.graph.parts import (
    BUILT_IN,
    INPUT,
    OUTPUT,
    Condition,
    Edge,
    Link,
    OutputCondition,
    Stage,
    WantsFile,
    full_name,
    member_of,
)
from segue.graph.walk import Walk, renamed, walk
from segue.messages.formats import FORMATS
from segue.messages.request import Request
from segue.messages.tensors import TensorSpec

__all__ = ["BUILT_IN", "INPUT", "OUTPUT", "Condition", "Edge", "Stage", "StageGraph", "Walk"]


class StageGraph:
    """The DAG of one model's stages. `stage` and `edge` build it, `validate` checks it; then it is only read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._declared: list[Stage] = [Stage(INPUT, "module")]
        self._drawn: list[Edge] = []
        self._tensors: list[TensorSpec] = []
        self._validated = False
        self._members: Mapping[str, StageGraph] = {}
        self._main_member = ""
        self.places: Mapping[str, str] = {}
        """In a graph of models: each place in it → the model there. A model can be at several."""
        self.links: tuple[Link, ...] = ()
        """Between the places of a graph of models."""

    @classmethod
    def joined(
        cls,
        name: str,
        members: Mapping[str, StageGraph],
        links: Iterable[Link],
        main: str,
        places: Mapping[str, str] | None = None,
    ) -> Self:
        """Put the graphs of several models side by side: stage `llm` of the model `think` becomes `think.llm`.

        Each `Request` is for one of them (`Request.member`); the orchestrator hands their outputs on over `links`.
        `main`: the model whose main stage makes the main output. `places`: each place of the graph, which `links`
        name, and the model there; by default each model is at the place with its own name."""
        graph = cls(name)
        graph.places = dict(zip(members, members, strict=True)) if places is None else dict(places)
        graph._members, graph._main_member, graph.links = dict(members), main, tuple(links)
        graph._declared, graph._drawn = [], []
        for member, one in members.items():
            for stage in one.stages.values():
                fused = stage.fuse_with and full_name(member, stage.fuse_with)
                shared = stage.shares_with and full_name(member, stage.shares_with)
                name = full_name(member, stage.name)
                graph._declared.append(replace(stage, name=name, fuse_with=fused, shares_with=shared, main=False))
            graph._drawn += [
                replace(edge, source=full_name(member, edge.source), target=full_name(member, edge.target))
                for edge in one.edges
            ]
        return graph

    def up_to(self, stage: str) -> Self:
        """Return the part of the graph that makes the output of one stage: itself and all its upstreams."""
        forward = [edge for edge in self.edges if edge.most is None]
        kept = checks.reachable(
            stage, {name: [edge.source for edge in forward if edge.target == name] for name in self.stages}
        )
        graph = type(self)(self.name)
        graph._declared = [one for one in self._declared if one.name in {INPUT, *kept}]
        graph._tensors = [spec for spec in self._tensors if spec.name in graph.takes]
        graph._declared = [one if one.fuse_with in kept else replace(one, fuse_with=None) for one in graph._declared]
        graph._drawn = [edge for edge in self._drawn if edge.source in {INPUT, *kept} and edge.target in kept]
        return graph

    # --- building: nothing is checked here, because `validate` checks the whole graph

    def stage(
        self,
        name: str,
        engine: str,
        *,
        takes: Iterable[str] = (),
        gives: Iterable[str] = (),
        fuse_with: str | None = None,
        shares_with: str | None = None,
        main: bool = False,
        divisible: bool = False,
        without: Iterable[str] = (),
        library: str = "",
        tensors: Iterable[str] = (),
    ) -> None:
        """Add a stage.

        `engine` names its engine kind: `autoregressive`, `diffusion`, `module`, or one of another package. `main` marks
        the stage whose end is the end of the response (by default the one that gives text, else the only one that gives
        anything); `fuse_with` suggests a stage to share a worker with, `shares_with` demands it, because
        the stage uses that one's weights and caches; `divisible`: one replica can be
        several processes with a part of the weights each (`tensor_parallel`); `without`: keys of its engine that the
        deployment must not set for it; `library` names the components of a library's pipeline that run in the stage, if
        any; `tensors`: prefixes of the names of its weights in the checkpoint, the longest counts.
        """
        stage = Stage(
            name,
            engine,
            frozenset(takes),
            frozenset(gives),
            fuse_with or shares_with,
            shares_with,
            main,
            divisible,
            frozenset(without),
            library,
            tuple(tensors),
        )
        self._declared.append(stage)
        self._validated = False

    def edge(
        self,
        source: str,
        target: str,
        *,
        when: Condition | None = None,
        on: OutputCondition | None = None,
        most: int | None = None,
    ) -> None:
        """Add an edge; it exists only for requests that satisfy `when`.

        `on`: the request takes the edge only after visits of the source whose outcome satisfies this; what leaves over
        the edge waits until that is known. `most`: the edge closes a loop, which a request may take so often. After
        each time, the target and all stages after it are visited again; a target that samples tokens goes on from the
        sequence that it holds. All loops of a graph return to the same stage.

        Edges from `INPUT` are implicit; add one only to give it a condition, or for a stage that reads the request
        without taking one of its modalities.
        """
        self._drawn.append(Edge(source, target, when, on, most))
        self._validated = False

    def tensor(self, name: str, *, dtype: str, shape: Sequence[int | None], tokens: int, most: int) -> None:
        """Declare a named tensor that stages may take, by its name, like a modality.

        `shape`: of one item; None is any size. `tokens`: tokens that an item takes in the sequence, 1 or one for each
        entry of its first axis. `most`: items in one request. Requests are checked against it before they are admitted.
        """
        self._tensors.append(TensorSpec(name, dtype, tuple(shape), tokens, most))
        self._validated = False

    def validate(self) -> None:
        """Raise `ConfigError` naming the first mistake and its remedy."""
        if self._validated:
            return
        for member in self._members.values():
            member.validate()
        if not self._members:
            checks.check(self.name, self._all, self.edges, self._tensors)
        self._validated = True

    # --- reading

    @property
    def stages(self) -> Mapping[str, Stage]:
        """All stages by name: `INPUT` first, then in declared order, `OUTPUT` last."""
        return MappingProxyType({stage.name: stage for stage in self._all})

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges: the implicit ones of `INPUT` first, then in declared order, those to `OUTPUT` last."""
        if self._members:
            return tuple(self._drawn)
        drawn = {edge.target for edge in self._drawn if edge.source == INPUT}
        own = tuple(Edge(INPUT, s.name) for s in self._declared if s.takes and s.name not in drawn and s.name != INPUT)
        files = tuple(Edge(s.name, OUTPUT, WantsFile(s.gives & FORMATS.keys())) for s in self._filed)
        return own + tuple(self._drawn) + files

    @property
    def _filed(self) -> list[Stage]:
        """The stages that give something of which there are files."""
        if self._members:
            return []  # each model has an output stage of its own
        return [stage for stage in self._declared if not stage.gives.isdisjoint(FORMATS)]

    @property
    def _all(self) -> list[Stage]:
        return [*self._declared, *([Stage(OUTPUT, "module")] if self._filed else [])]

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The named tensors that it declares."""
        taking = [graph._tensors for member, graph in self._members.items() if member in self._entries]
        return MappingProxyType({spec.name: spec for specs in (self._tensors, *taking) for spec in specs})

    @property
    def takes(self) -> frozenset[str]:
        """Modalities a request may carry."""
        entries = self._entries if self._members else {""}
        return frozenset().union(*(stage.takes for stage in self._declared if member_of(stage.name) in entries))

    @property
    def _entries(self) -> set[str]:
        """The models of a graph of models that take the client's request."""
        fed = {link.target for link in self.links if link.most is None}
        return {member for place, member in self.places.items() if place not in fed}

    @property
    def gives(self) -> frozenset[str]:
        """Modalities a request may ask for."""
        return frozenset().union(*(stage.gives for stage in self._declared))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The stages that give something to the client."""
        return tuple(stage.name for stage in self._declared if stage.gives)

    @property
    def main(self) -> str:
        """The stage that makes the main output; the request takes its finish reason."""
        return self.main_of(self._main_member)

    @property
    def members(self) -> tuple[str, ...]:
        """The models of a graph of models; none in a single model's graph."""
        return tuple(self._members)

    def main_of(self, member: str) -> str:
        """Return the main stage of a model; `member` is empty in a single model's graph."""
        self.validate()
        if self._members:
            return full_name(member, self._members[member].main)
        return checks.main_stage(self.name, self._declared)

    def giver(self, member: str, modality: str) -> str:
        """Return the stage of a model that gives a modality."""
        return next(one.name for one in self._declared if member_of(one.name) == member and modality in one.gives)

    def takes_with(self, stage: str) -> frozenset[str]:
        """Return the modalities that the model of a stage takes."""
        return frozenset().union(*(one.takes for one in self._declared if member_of(one.name) == member_of(stage)))

    def downstreams(self, name: str) -> tuple[str, ...]:
        return tuple(edge.target for edge in self.edges if edge.source == name)

    def topological(self) -> tuple[str, ...]:
        """Return all stages, each after its upstreams but those that return, otherwise in declared order."""
        self.validate()
        return checks.topological(self.name, list(self.stages), self.edges)

    def walk(self, request: Request) -> Walk:
        """Return the stages that run for this request and how they are connected; pure. Raises `InvalidRequest`."""
        if self._members:
            return renamed(self._members[request.member].walk(request), request.member)
        stages = self.stages
        return walk(request, [stages[name] for name in self.topological()], self.edges)
