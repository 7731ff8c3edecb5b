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
some modality of the request. One that gives audio also has the stage `OUTPUT`, a CPU stage that makes files, with an
edge from every stage whose output can be in one. The graph knows no devices or processes; the deployment
(`segue.graph.deployment.deployment`) adds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from segue.graph import checks
from segue.graph.parts import BUILT_IN, INPUT, OUTPUT, Condition, Edge, Stage, WantsFile
from segue.graph.walk import Walk, walk
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

    # --- building: nothing is checked here, because `validate` checks the whole graph

    def stage(
        self,
        name: str,
        engine: str,
        *,
        takes: Iterable[str] = (),
        gives: Iterable[str] = (),
        fuse_with: str | None = None,
        main: bool = False,
        divisible: bool = False,
        without: Iterable[str] = (),
        library: str = "",
        tensors: Iterable[str] = (),
    ) -> None:
        """Add a stage.

        `engine` names its engine kind: `autoregressive`, `diffusion`, `module`, or one of another package. `main` marks
        the stage whose end is the end of the response (by default the one that gives text, else the only one that gives
        anything); `fuse_with` suggests a stage to share a worker with; `divisible`: one replica can be
        several processes with a part of the weights each (`tensor_parallel`); `without`: keys of its engine that the
        deployment must not set for it; `library` names the components of a library's pipeline that run in the stage, if
        any; `tensors`: prefixes of the names of its weights in the checkpoint, the longest counts.
        """
        stage = Stage(
            name,
            engine,
            frozenset(takes),
            frozenset(gives),
            fuse_with,
            main,
            divisible,
            frozenset(without),
            library,
            tuple(tensors),
        )
        self._declared.append(stage)
        self._validated = False

    def edge(self, source: str, target: str, *, when: Condition | None = None) -> None:
        """Add an edge; it exists only for requests that satisfy `when`.

        Edges from `INPUT` are implicit; add one only to give it a condition, or for a stage that reads the request
        without taking one of its modalities.
        """
        self._drawn.append(Edge(source, target, when))
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
        drawn = {edge.target for edge in self._drawn if edge.source == INPUT}
        own = tuple(Edge(INPUT, s.name) for s in self._declared if s.takes and s.name not in drawn and s.name != INPUT)
        files = tuple(Edge(s.name, OUTPUT, WantsFile(s.gives & FORMATS.keys())) for s in self._filed)
        return own + tuple(self._drawn) + files

    @property
    def _filed(self) -> list[Stage]:
        """The stages that give something of which there are files."""
        return [stage for stage in self._declared if not stage.gives.isdisjoint(FORMATS)]

    @property
    def _all(self) -> list[Stage]:
        return [*self._declared, *([Stage(OUTPUT, "module")] if self._filed else [])]

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The named tensors that it declares."""
        return MappingProxyType({spec.name: spec for spec in self._tensors})

    @property
    def takes(self) -> frozenset[str]:
        """Modalities a request may carry."""
        return frozenset().union(*(stage.takes for stage in self._declared))

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
        self.validate()
        return checks.main_stage(self.name, self._declared)

    def downstreams(self, name: str) -> tuple[str, ...]:
        return tuple(edge.target for edge in self.edges if edge.source == name)

    def topological(self) -> tuple[str, ...]:
        """Return all stages, each after its upstreams, otherwise in declared order."""
        self.validate()
        return checks.topological(self.name, list(self.stages), self.edges)

    def walk(self, request: Request) -> Walk:
        """Return the stages that run for this request and how they are connected; pure. Raises `InvalidRequest`."""
        stages = self.stages
        return walk(request, [stages[name] for name in self.topological()], self.edges)
