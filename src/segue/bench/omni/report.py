"""Format a result: a Markdown table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.bench.harness.report import NamedColumns, drawn, host, page, table, table_by, three
from segue.bench.harness.stages import HOP_COLUMNS, USAGE_COLUMNS, stage_table
from segue.bench.omni.outcome import Outcome
from segue.bench.omni.results import LevelResult, Result, SideFigures

# one colour per stage, the same in every image
STAGE_COLOURS = {
    "queue": "#d9d9d9",
    "input": "#8c8c8c",
    "encoder": "#b07aa1",
    "thinker": "#4e79a7",
    "talker": "#f28e2b",
    "vocoder": "#59a14f",
}
_LATENCY: NamedColumns[SideFigures] = {
    "JCT mean / p50 / p99 (s)": lambda side, one: three(one.metrics["jct"]),
    "TTFT (s)": lambda side, one: f"{one.metrics['ttft'].mean:.2f}",
    "TTFA mean / p50 / p99 (s)": lambda side, one: three(one.metrics["ttfa"]),
    "RTF": lambda side, one: f"{one.metrics['rtf'].mean:.2f}",
    "req/s": lambda side, one: f"{one.throughput['requests']:.3f}",
    "audio s/s": lambda side, one: f"{one.throughput['audio_seconds']:.2f}",
}


def markdown(result: Result) -> str:
    """The whole result, as tables."""
    parts = [f"## {title(result)}", conditions(result), *result.unfinished]
    for level in result.levels:
        parts += [f"### {level.load}", table_by("side", level.sides, _LATENCY), ratio_table(level)]
        parts += [stage_table(level.stages), table_by("edge", level.hops, HOP_COLUMNS)]
        parts.append(table_by("side", level.usage, USAGE_COLUMNS))
    return page(parts)


def title(result: Result) -> str:
    settings = result.settings
    return f"{settings.model}, {settings.dtype} on {settings.device}, {result.finished[:10]}"


def conditions(result: Result) -> str:
    """One paragraph: machine, versions, threads, size of the run."""
    settings = result.settings
    threads = "; ".join(
        f"{side}: {', '.join(f'{name} {count}' for name, count in workers.items())}"
        for side, workers in settings.threads.items()
    )
    return (
        f"{host(result.machine, result.machine.packages)} CPU threads: {threads}. "
        f"Workload `{settings.workload}`: {settings.rounds} rounds of {settings.requests} requests per side after "
        f"{settings.warmup} to warm up; "
        f"seed {settings.seed}, weights {'random' if settings.load_format == 'dummy' else 'of the checkpoint'}."
    )


def ratio_table(level: LevelResult) -> str:
    if not level.ratios:
        return ""
    rows = []
    for baseline, metrics in level.ratios.items():
        cells = [
            f"{(value.mean - 1):+.0%} ({value.low - 1:+.0%} to {value.high - 1:+.0%})" for value in metrics.values()
        ]
        same = level.agreement[baseline]
        rows.append([f"Segue against {baseline}", *cells, f"{same['reply']:.0%} / {same['codes']:.0%}"])
    names = [name.upper() for name in next(iter(level.ratios.values()))]
    return table(["", *names, "same text / codes"], rows)


def plot(result: Result, path: Path) -> None:
    """Left: mean JCT, TTFA and TTFT per side and concurrency. Right: the timeline of one typical request."""
    size = (14, 3.6 * len(result.levels))
    with drawn(path, title(result), size, rows=len(result.levels), columns=2) as grid:
        for (bars, timeline), level in zip(grid, result.levels, strict=True):
            _bars(bars, level)
            _timeline(timeline, level)


def _bars(axes: Any, level: LevelResult) -> None:
    metrics, width = ("jct", "ttfa", "ttft"), 0.8 / len(level.sides)
    for number, (name, side) in enumerate(level.sides.items()):
        places = [place + number * width for place in range(len(metrics))]
        made = axes.bar(places, [side.metrics[metric].mean for metric in metrics], width, label=name)
        axes.bar_label(made, fmt="%.2f", fontsize=8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(metrics))], [metric.upper() for metric in metrics])
    axes.set_ylabel("seconds, mean")
    axes.set_title(level.load)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)


def _timeline(axes: Any, level: LevelResult) -> None:
    """A stage waits and works on one line; the queue of a baseline has its own."""
    index = typical(next(iter(level.outcomes.values()))).index
    labels: list[str] = []
    for name, outcomes in level.outcomes.items():
        outcome = next(outcome for outcome in outcomes if outcome.index == index)
        for stage, what, start, end in outcome.spans:
            waits = what in ("queue", "waiting")
            colour, alpha = STAGE_COLOURS.get(stage, "#333333"), 0.25 if waits else 1.0
            axes.barh(len(labels), end - start, left=start, color=colour, alpha=alpha, height=0.8)
            if not waits or stage == "queue":
                labels.append(f"{name}: {stage}")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the client sent the request (pale: waiting)")
    axes.set_title(f"request {index}")


def typical(outcomes: list[Outcome]) -> Outcome:
    """The outcome whose JCT is the median."""
    return sorted(outcomes, key=lambda outcome: outcome.jct)[len(outcomes) // 2]
