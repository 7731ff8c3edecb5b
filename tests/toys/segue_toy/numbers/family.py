"""input → counter (autoregressive, text and rows) → talker (autoregressive, rows of numbers that end by a score) →
tones (module, audio)."""

from __future__ import annotations

from segue.models.family import Family
from segue_toy.rows.family import graph

ARCHITECTURE = "ToyNumbersForConditionalGeneration"
FAMILY = Family(
    name="toy_numbers",
    architectures=frozenset({ARCHITECTURE}),
    graph=graph,
    stages_module="segue_toy.numbers.stages",
    options=frozenset({"hold"}),
)
