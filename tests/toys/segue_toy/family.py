"""input → counter (autoregressive, text and rows) → tone (module, audio)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.messages.speech import TextToSpeech
from segue.models.family import Family


def graph(config: dict[str, Any]) -> StageGraph:
    g = StageGraph("toy")
    g.stage("counter", "autoregressive", takes={"text"}, gives={"text"})
    g.stage("tone", "module", gives={"audio"})
    g.edge("counter", "tone")
    return g


FAMILY = Family(
    name="toy",
    architectures=frozenset({"ToyForConditionalGeneration"}),
    graph=graph,
    stages_module="segue_toy.stages",
    says=lambda config, model_dir: TextToSpeech(),
    appends=True,
    goes_on=True,
    options=frozenset({"hold", "fail_at", "die_at", "lost_at"}),
)


def make(directory: Path, architecture: str = "ToyForConditionalGeneration", **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return directory
