"""The result of `examples/assistant/first_sound.py`: seconds to the first sound of models joined into one graph, and of
the same models one after the other."""

from __future__ import annotations

from segue.bench.harness.hardware import Machine
from segue.bench.harness.report import of_run, page, table
from segue.bench.harness.results import Growing, now
from segue.bench.harness.stats import ratio, summary

GRAPH, CHAIN = "one graph", "one after the other"


class SoundResult(Growing, kw_only=True):
    """`seconds`: side → seconds to the first sound of each request; the sides had the same requests in turn."""

    benchmark: str = "first-sound"
    tokens: int
    """Of a reply."""
    seconds: dict[str, list[float]]


def sound_result(machine: Machine, tokens: int, graph: list[float], chain: list[float]) -> SoundResult:
    """The result of a whole run."""
    seconds = {GRAPH: graph, CHAIN: chain}
    return SoundResult(finished=now(), done=1, planned=1, machine=machine, tokens=tokens, seconds=seconds)


def markdown(result: SoundResult) -> str:
    graph = result.seconds[GRAPH]
    rows = []
    for side, times in result.seconds.items():
        compared = ratio([list(zip(graph, times, strict=True))])
        spread = f"{summary(times).p50:.2f} ({min(times):.2f}–{max(times):.2f})"
        rows.append([side, str(len(times)), spread, f"{compared.mean:.2f}×"])
    asked = f"One request at a time; a reply has {result.tokens} tokens."
    head = ["side", "requests", "first sound, s", "the graph's of it"]
    return page([of_run(result), asked, *result.unfinished, table(head, rows)])
