"""The family; a request's `num_frames` says how long a film is."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.family import Family

ARCHITECTURE = "ToyFilm"


def graph(config: dict[str, Any]) -> StageGraph:
    g = StageGraph("toy_film")
    g.stage("film", "module", takes={"text"}, gives={"video"})
    return g


FAMILY = Family(
    name="toy_film",
    architectures=frozenset({ARCHITECTURE}),
    graph=graph,
    stages_module="segue_toy.film.stages",
)
