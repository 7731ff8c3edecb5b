"""Format a result of `segue bench text`: a Markdown table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.bench.harness.report import (
    Columns,
    bars,
    drawn,
    host,
    page,
    startup_table,
    table,
    table_of,
    three,
)
from segue.bench.text.results import Scenario, TextResult, TextSide


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
        gaps = [[side, three(gaps, 0, 1000)] for side, gaps in result.intrusion.items()]
        parts.append(table(["side", "ITL of running answers, mean / p50 / p99 (ms)"], gaps))
    if result.crowds:
        sides = list(dict.fromkeys(side for case in result.crowds.values() for side in case))
        rows = [[case, *(f"{walls[side]:.2f}" for side in sides)] for case, walls in result.crowds.items()]
        parts += ["### A crowd at once: seconds until the last answer", table(["prompts", *sides], rows)]
    return page(parts)


def scenario_table(scenario: Scenario) -> str:
    columns: Columns[tuple[str, TextSide]] = {
        "side": lambda row: row[0],
        "tokens/s": lambda row: f"{row[1].tokens_per_second:.1f}",
        "Segue over it": lambda row: f"{scenario.ratios[row[0]]:.2f}×" if row[0] in scenario.ratios else "",
        "TTFT mean / p50 / p99 (ms)": lambda row: three(row[1].ttft, 0, 1000),
        "TPOT mean / p50 / p99 (ms)": lambda row: three(row[1].tpot, 0, 1000),
        "ITL mean / p50 / p99 (ms)": lambda row: "" if row[1].itl is None else three(row[1].itl, 0, 1000),
        "same tokens": lambda row: f"{row[1].same_tokens:.0%}",
    }
    if scenario.objective:
        ttft, tpot = scenario.objective
        kept = f"requests/s within {ttft:g} s, {1000 * tpot:g} ms"
        columns = {**columns, kept: lambda row: f"{row[1].goodput:.2f} ({row[1].kept:.0%})"}
    return table_of(scenario.sides.items(), columns)


def plot(result: TextResult, path: Path) -> None:
    """Left: output tokens per second of every side in every scenario. Right: the crowds."""
    title = f"{result.settings.model}, {result.settings.dtype}, {result.finished[:10]}"
    with drawn(path, title, (15, 1.5 + 0.7 * max(6, len(result.scenarios))), columns=2) as [[left, right]]:
        speeds = {
            one.name: {side: figures.tokens_per_second for side, figures in one.sides.items()}
            for one in result.scenarios
        }
        bars(left, speeds, "output tokens per second", 1)
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
