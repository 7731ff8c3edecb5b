"""input → writer (autoregressive, text) ⇢ draw (module) → show (module, image)
                 ↑                        ↓
                 ╰─────── at most 3 ──── see (module)

                   writer → tone (module, audio)

⇢ only if the sum of what it wrote can be divided by the option `every`. With `refine` in the config, a loop of modules:

input → polish → judge ⇢ polish, at most 3
        polish → show"""

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


def _refining() -> StageGraph:
    g = StageGraph("toy_refining")
    g.stage("polish", "module", takes={"text"})
    g.stage("judge", "module")
    g.stage("show", "module", gives={"image"})
    g.edge("polish", "show")
    g.edge("polish", "judge")
    g.edge("judge", "polish", on=rough, most=MOST)
    return g


def rough(request: Request, outcome: Outcome) -> bool:
    return int(outcome.facts["value"]) > int(request.options.get("fine", 0))


def graph(config: dict[str, Any]) -> StageGraph:
    if config.get("refine"):
        return _refining()
    g = StageGraph("toy_loop")
    g.stage("writer", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("draw", "module")
    g.stage("show", "module", gives={"image"})
    g.stage("see", "module")
    g.edge("writer", "draw", on=asks_for_image)
    g.edge("draw", "show")
    g.edge("draw", "see")
    g.edge("see", "writer", most=MOST)
    g.stage("tone", "module", gives={"audio"})
    g.edge("writer", "tone")
    return g


FAMILY = Family(
    name="toy_loop",
    architectures=frozenset({"ToyLoop"}),
    graph=graph,
    stages_module="segue_toy.loop.stages",
    options=frozenset({"hold", "fail_at", "die_at", "every", "breaks", "vague", "fine"}),
)
