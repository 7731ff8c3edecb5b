"""The stage graph of one model, as a value: named stages, edges between them, and what a request makes of them.

    g = StageGraph("speaking")
    g.stage("encoder", "module", takes={"image", "audio", "video"})
    g.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("talker", "autoregressive")
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("encoder", "thinker")
    g.edge("thinker", "talker")
    g.edge("talker", "vocoder")
    g.validate()

Every graph has one stage more, `INPUT`: the family's processor, a CPU stage with an edge to every stage that takes
something of the request. The graph knows no device and no process; the deployment (`segue.graph.deployment`) is laid
over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from segue.graph import checks
from segue.graph.parts import INPUT, Condition, Edge, Engine, Stage
from segue.graph.walk import Walk, walk
from segue.messages.request import Request

__all__ = ["INPUT", "Condition", "Edge", "Engine", "Stage", "StageGraph", "Walk"]


class StageGraph:
    """The DAG of stages of one model. Built by `stage` and `edge`, checked by `validate`, then only read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._declared: list[Stage] = [Stage(INPUT, "module")]
        self._drawn: list[Edge] = []
        self._validated = False

    # --- building: nothing is checked here, so that `validate` can look at the whole

    def stage(
        self,
        name: str,
        engine: Engine,
        *,
        takes: Iterable[str] = (),
        gives: Iterable[str] = (),
        fuse_with: str | None = None,
        main: bool = False,
        divisible: bool = False,
        library: str = "",
    ) -> None:
        """Add a stage.

        `main` marks the stage whose end is the end of the answer (by default the one that gives text, else the only
        one that gives anything); `fuse_with` suggests a stage to share a worker with; `divisible`: one replica can be
        several processes with a part of the weights each (`tensor_parallel`); `library` says what of a library's own
        pipeline runs in the stage, where that is so.
        """
        stage = Stage(name, engine, frozenset(takes), frozenset(gives), fuse_with, main, divisible, library)
        self._declared.append(stage)
        self._validated = False

    def edge(self, source: str, target: str, *, when: Condition | None = None) -> None:
        """Add an edge; a request for which `when` is false does not have it.

        Edges from `INPUT` come by themselves; draw one only to give it a condition, or for a stage that reads the
        request without taking a modality of it.
        """
        self._drawn.append(Edge(source, target, when))
        self._validated = False

    def validate(self) -> None:
        """Raise `ConfigError` naming the first mistake and what would be right."""
        if self._validated:
            return
        checks.check(self.name, self._declared, self.edges)
        self._validated = True

    # --- reading

    @property
    def stages(self) -> Mapping[str, Stage]:
        """By name, `INPUT` first, then as declared."""
        return MappingProxyType({stage.name: stage for stage in self._declared})

    @property
    def edges(self) -> tuple[Edge, ...]:
        """`INPUT`'s own edges first, then as declared."""
        drawn = {edge.target for edge in self._drawn if edge.source == INPUT}
        own = tuple(Edge(INPUT, s.name) for s in self._declared if s.takes and s.name not in drawn and s.name != INPUT)
        return own + tuple(self._drawn)

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
        """The stage that makes the main output; its finish reason is the request's."""
        self.validate()
        return checks.main_stage(self.name, self._declared)

    def downstreams(self, name: str) -> tuple[str, ...]:
        return tuple(edge.target for edge in self.edges if edge.source == name)

    def topological(self) -> tuple[str, ...]:
        """All stages, every one after its upstreams; as declared where the edges leave a choice."""
        self.validate()
        return checks.topological(self.name, list(self.stages), self.edges)

    def walk(self, request: Request) -> Walk:
        """What runs for this request, and who waits for whom; pure. Raises `InvalidRequest`."""
        stages = self.stages
        return walk(request, [stages[name] for name in self.topological()], self.edges)
