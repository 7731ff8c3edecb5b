"""Format a result: a Markdown table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.bench.harness.meters import SideUsage
from segue.bench.harness.report import Columns, drawn, host, page, table, table_of, three
from segue.bench.harness.stats import HistogramFigures
from segue.bench.omni.outcome import Outcome
from segue.bench.omni.results import LevelResult, Result, SideFigures, StageFigures

MIB = 2**20
# one colour per stage, the same in every image
STAGE_COLOURS = {
    "queue": "#d9d9d9",
    "input": "#8c8c8c",
    "encoder": "#b07aa1",
    "thinker": "#4e79a7",
    "talker": "#f28e2b",
    "vocoder": "#59a14f",
}


def markdown(result: Result) -> str:
    """The whole result, as tables."""
    parts = [f"## {title(result)}", conditions(result), *result.unfinished]
    for level in result.levels:
        parts += [f"### {level.load}", latency_table(level), ratio_table(level)]
        parts += [stage_table(level), hop_table(level), usage_table(level)]
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


def latency_table(level: LevelResult) -> str:
    columns: Columns[tuple[str, SideFigures]] = {
        "side": lambda row: row[0],
        "JCT mean / p50 / p99 (s)": lambda row: three(row[1].metrics["jct"]),
        "TTFT (s)": lambda row: f"{row[1].metrics['ttft'].mean:.2f}",
        "TTFA mean / p50 / p99 (s)": lambda row: three(row[1].metrics["ttfa"]),
        "RTF": lambda row: f"{row[1].metrics['rtf'].mean:.2f}",
        "req/s": lambda row: f"{row[1].throughput['requests']:.3f}",
        "audio s/s": lambda row: f"{row[1].throughput['audio_seconds']:.2f}",
    }
    return table_of(level.sides.items(), columns)


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


def stage_table(level: LevelResult) -> str:
    columns: Columns[tuple[str, str, StageFigures]] = {
        "side": lambda row: row[0],
        "stage": lambda row: row[1],
        "while busy": lambda row: f"{row[2].per_busy_second:.1f} {row[2].unit}/s",
        "busy": lambda row: f"{row[2].utilisation:.0%}",
        "steps": lambda row: "" if row[2].steps is None else _steps(row[2].steps),
        "batch": lambda row: "" if row[2].batch is None else f"{row[2].batch.mean:.1f}",
    }
    return table_of(
        [(side, stage, figures) for side, stages in level.stages.items() for stage, figures in stages.items()], columns
    )


def _steps(steps: HistogramFigures) -> str:
    return f"{steps.count} × {1000 * steps.mean:.1f} ms (p99 {1000 * steps.p99:.0f})"


def hop_table(level: LevelResult) -> str:
    columns: Columns[tuple[str, HistogramFigures]] = {
        "edge": lambda row: row[0],
        "chunks": lambda row: str(row[1].count),
        "mean (ms)": lambda row: f"{1000 * row[1].mean:.2f}",
        "p50 (ms)": lambda row: f"{1000 * row[1].p50:.2f}",
        "p99 (ms)": lambda row: f"{1000 * row[1].p99:.2f}",
    }
    return table_of(level.hops.items(), columns) if level.hops else ""


def usage_table(level: LevelResult) -> str:
    columns: Columns[tuple[str, SideUsage]] = {
        "side": lambda row: row[0],
        "peak memory (PSS)": lambda row: f"{row[1].peak_pss_bytes / MIB:.0f} MiB",
        "CPU seconds by process": lambda row: ", ".join(
            f"{who} {took:.1f}" for who, took in row[1].cpu_seconds.items()
        ),
        "CPU seconds of the others meanwhile": lambda row: f"{row[1].others_cpu_seconds:.1f}",
    }
    return table_of(level.usage.items(), columns)


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
        values = [side.metrics[metric].mean for metric in metrics]
        drawn = axes.bar(places, values, width, label=name)
        axes.bar_label(drawn, fmt="%.2f", fontsize=8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(metrics))], [metric.upper() for metric in metrics])
    axes.set_ylabel("seconds, mean")
    axes.set_title(level.load)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)


def _timeline(axes: Any, level: LevelResult) -> None:
    index = typical(next(iter(level.outcomes.values()))).index
    labels, place = [], 0
    for name, outcomes in level.outcomes.items():
        outcome = next(outcome for outcome in outcomes if outcome.index == index)
        for stage, what, start, end in outcome.spans:
            waits = what in ("queue", "waiting")
            colour = STAGE_COLOURS.get(stage, "#333333")
            axes.barh(place, end - start, left=start, color=colour, alpha=0.25 if waits else 1.0, height=0.8)
            labels.append(f"{name}: {stage}" if not waits or stage == "queue" else "")
            if not waits or stage == "queue":
                place += 1
            else:
                labels.pop()
    axes.set_yticks(range(place), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the client sent the request (pale: waiting)")
    axes.set_title(f"request {index}")


def typical(outcomes: list[Outcome]) -> Outcome:
    """The outcome whose JCT is the median."""
    return sorted(outcomes, key=lambda outcome: outcome.jct)[len(outcomes) // 2]
