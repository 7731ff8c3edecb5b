"""Format a result of `segue bench text`: a Markdown table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.bench.harness.load_report import drawn, head, table
from segue.bench.harness.stats import Summary
from segue.bench.text.results import Scenario, TextResult


def markdown(result: TextResult) -> str:
    """The whole result, as tables."""
    settings = result.settings
    packages = result.machine.packages | ({"vllm": settings.vllm} if settings.vllm else {})
    run = f"{settings.threads} threads per side, preloaded: {settings.preload or 'nothing'}."
    parts = head(result, f"{settings.model}, {settings.dtype}", packages, run, settings.rounds, settings.seed)
    for scenario in result.scenarios:
        parts += [f"### {scenario.name}", scenario_table(scenario)]
    if result.intrusion:
        rows = [[side, _ms(gaps)] for side, gaps in result.intrusion.items()]
        parts.append(f"### While a prompt of {result.intrusion_prompt} tokens is read")
        parts.append(table(["side", "ITL of running answers, mean / p50 / p99 (ms)"], rows))
    if result.crowds:
        sides = list(dict.fromkeys(side for case in result.crowds.values() for side in case))
        rows = [[case, *(f"{walls[side]:.2f}" for side in sides)] for case, walls in result.crowds.items()]
        parts += ["### A crowd at once: seconds until the last answer", table(["prompts", *sides], rows)]
    return "\n\n".join(parts) + "\n"


def scenario_table(scenario: Scenario) -> str:
    columns = ["side", "tokens/s", "Segue over it", "TTFT", "TPOT", "ITL"]
    columns = [*columns[:3], *(f"{name} mean / p50 / p99 (ms)" for name in columns[3:]), "same tokens"]
    if scenario.objective:
        columns.append(f"requests/s within {scenario.objective[0]:g} s, {1000 * scenario.objective[1]:g} ms")
    rows = []
    for side, figures in scenario.sides.items():
        ratio = scenario.ratios.get(side)
        row = [side, f"{figures.tokens_per_second:.1f}", "" if ratio is None else f"{ratio:.2f}×", _ms(figures.ttft)]
        row += [_ms(figures.tpot), "" if figures.itl is None else _ms(figures.itl), f"{figures.same_tokens:.0%}"]
        if figures.goodput is not None and figures.kept is not None:
            row.append(f"{figures.goodput:.2f} ({figures.kept:.0%})")
        rows.append(row)
    return table(columns, rows)


def _ms(summary: Summary) -> str:
    return " / ".join(f"{1000 * value:.0f}" for value in (summary.mean, summary.p50, summary.p99))


def plot(result: TextResult, path: Path) -> None:
    """Left: output tokens per second of every side in every scenario. Right: the crowds."""
    title = f"{result.settings.model}, {result.settings.dtype}, {result.finished[:10]}"
    with drawn(path, title, (15, 1.5 + 0.7 * max(6, len(result.scenarios))), columns=2) as [[bars, crowds]]:
        _bars(bars, result.scenarios)
        _crowds(crowds, result.crowds)


def _bars(axes: Any, scenarios: list[Scenario]) -> None:
    sides = list(dict.fromkeys(side for scenario in scenarios for side in scenario.sides))
    height = 0.8 / max(1, len(sides))
    for number, side in enumerate(sides):
        own = [
            (place + number * height, scenario.sides[side].tokens_per_second)
            for place, scenario in enumerate(scenarios)
            if side in scenario.sides
        ]
        drawn = axes.barh([place for place, _ in own], [speed for _, speed in own], height, label=side)
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(scenarios))], [one.name for one in scenarios])
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second")
    axes.legend(fontsize=8)


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
