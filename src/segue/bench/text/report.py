"""Format a result of `segue bench text`: a Markdown table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.bench.harness.report import (
    NamedColumns,
    bars,
    drawn,
    host,
    milliseconds,
    page,
    startup_table,
    table,
    table_by,
)
from segue.bench.harness.stats import Summary
from segue.bench.text.results import Scenario, TextResult, TextSide

_INTRUSION: NamedColumns[Summary] = {
    "ITL of running answers, mean / p50 / p99 (ms)": lambda side, gaps: milliseconds(gaps)
}


def markdown(result: TextResult) -> str:
    """The whole result, as tables."""
    settings = result.settings
    packages = result.machine.packages | ({"vllm": settings.vllm} if settings.vllm else {})
    parts = [
        f"## {settings.model}, {settings.dtype}, {result.finished[:10]}",
        f"{host(result.machine, packages)} {settings.threads} threads per side, preloaded: "
        f"{settings.preload or 'nothing'}. {settings.rounds} rounds, sides in turn; seed {settings.seed}.",
        *result.unfinished,
        startup_table(result.startup),
    ]
    for scenario in result.scenarios:
        parts += [f"### {scenario.name}", scenario_table(scenario)]
    if result.intrusion:
        parts.append(f"### While a prompt of {result.intrusion_prompt} tokens is read")
        parts.append(table_by("side", result.intrusion, _INTRUSION))
    if result.crowds:
        sides = list(dict.fromkeys(side for case in result.crowds.values() for side in case))
        rows = [[case, *(f"{walls[side]:.2f}" for side in sides)] for case, walls in result.crowds.items()]
        parts += ["### A crowd at once: seconds until the last answer", table(["prompts", *sides], rows)]
    return page(parts)


def scenario_table(scenario: Scenario) -> str:
    columns: NamedColumns[TextSide] = {
        "tokens/s": lambda side, one: f"{one.tokens_per_second:.1f}",
        "Segue over it": lambda side, one: f"{scenario.ratios[side]:.2f}×" if side in scenario.ratios else "",
        "TTFT mean / p50 / p99 (ms)": lambda side, one: milliseconds(one.ttft),
        "TPOT mean / p50 / p99 (ms)": lambda side, one: milliseconds(one.tpot),
        "ITL mean / p50 / p99 (ms)": lambda side, one: milliseconds(one.itl),
        "same tokens": lambda side, one: f"{one.same_tokens:.0%}",
    }
    if scenario.objective:
        ttft, tpot = scenario.objective
        kept = f"requests/s within {ttft:g} s, {1000 * tpot:g} ms"
        columns = {**columns, kept: lambda side, one: f"{one.goodput:.2f} ({one.kept:.0%})"}
    return table_by("side", scenario.sides, columns)


def plot(result: TextResult, path: Path) -> None:
    """Left: output tokens per second of every side in every scenario. Right: the crowds."""
    title = f"{result.settings.model}, {result.settings.dtype}, {result.finished[:10]}"
    with drawn(path, title, (15, 1.5 + 0.7 * max(6, len(result.scenarios))), columns=2) as [[left, right]]:
        bars(left, result.scenarios, lambda side: side.tokens_per_second, "output tokens per second", 1)
        _crowds(right, result.crowds)


def _crowds(axes: Any, crowds: dict[str, dict[str, float]]) -> None:
    cases = {case: walls for case, walls in crowds.items() if case.endswith("different")}
    for side in dict.fromkeys(side for walls in cases.values() for side in walls):
        points = [(int(case.split()[0]), walls[side]) for case, walls in cases.items() if side in walls]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=side)
    if cases:
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=8)
    axes.set_xlabel("simultaneous requests of different prompts")
    axes.set_ylabel("seconds until the last answer")
