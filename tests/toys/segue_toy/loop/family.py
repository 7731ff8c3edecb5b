"""input → writer (autoregressive, text) ⇢ draw (module) → show (module, image)
                 ↑                        ↓
                 ╰─────── at most 3 ──── see (module)

⇢ only if the sum of what it wrote can be divided by the option `every`."""

from __future__ import annotations

from typing import Any

from segue.graph.parts import Outcome
from segue.graph.stage_graph import StageGraph
from segue.messages.request import Request
from segue.models.family import Family

MOST = 3


def asks_for_image(request: Request, outcome: Outcome) -> bool:
    if request.options.get("breaks"):
        raise LookupError("told to break")
    answer: bool = sum(outcome.token_ids) % int(request.options.get("every", 1)) == 0
    return answer if not request.options.get("vague") else None  # type: ignore[return-value]


def bright(request: Request, outcome: Outcome) -> bool:
    return int(outcome.facts["value"]) % 7 != 0


def graph(config: dict[str, Any]) -> StageGraph:
    g = StageGraph("toy_loop")
    g.stage("writer", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("draw", "module")
    g.stage("show", "module", gives={"image"})
    g.stage("see", "module")
    g.edge("writer", "draw", on=asks_for_image)
    g.edge("draw", "show")
    g.edge("draw", "see", on=bright if config.get("picky") else None)
    g.edge("see", "writer", most=MOST)
    return g


FAMILY = Family(
    name="toy_loop",
    architectures=frozenset({"ToyLoop"}),
    graph=graph,
    stages_module="segue_toy.loop.stages",
    options=frozenset({"hold", "fail_at", "die_at", "every", "breaks", "vague"}),
)
