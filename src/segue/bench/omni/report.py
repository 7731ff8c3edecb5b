"""Format a result: a Markdown table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.bench.harness.load_report import drawn, table
from segue.bench.omni.outcome import Outcome
from segue.bench.omni.results import LevelResult, Result

MIB = 2**20
BASELINE = "transformers"
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
    parts = [f"## {title(result)}", hardware(result), result.unfinished]
    for level in result.levels:
        parts += [f"### Concurrency {level.concurrency}", latency_table(level), ratio_table(level)]
        parts += [stage_table(level), hop_table(level), usage_table(level)]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(result: Result) -> str:
    settings = result.settings
    return f"{settings.model}, {settings.dtype} on {settings.device}, {result.finished[:10]}"


def hardware(result: Result) -> str:
    """One paragraph: machine, versions, threads, size of the run."""
    machine, settings = result.machine, result.settings
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    threads = "; ".join(
        f"{side}: {', '.join(f'{name} {count}' for name, count in workers.items())}"
        for side, workers in settings.threads.items()
    )
    gpus = f", {'; '.join(machine.gpus)}" if machine.gpus else ""
    load = ", ".join(f"{value:.1f}" for value in machine.load_average)
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_bytes / 2**30:.0f} GiB{gpus}; {machine.system}, "
        f"Python {machine.python}, {packages}. CPU threads: {threads}. Load average at the start: {load}. "
        f"{settings.rounds} rounds of {settings.requests} requests per side after {settings.warmup} to warm up; "
        f"seed {settings.seed}, weights {'random' if settings.load_format == 'dummy' else 'of the checkpoint'}."
    )


def latency_table(level: LevelResult) -> str:
    head = ["side", "JCT mean / p50 / p99 (s)", "TTFT (s)", "TTFA mean / p50 / p99 (s)", "RTF", "req/s", "audio s/s"]
    rows = []
    for name, side in level.sides.items():
        jct, ttfa = side.metrics["jct"], side.metrics["ttfa"]
        rows.append(
            [
                name,
                f"{jct.mean:.2f} / {jct.p50:.2f} / {jct.p99:.2f}",
                f"{side.metrics['ttft'].mean:.2f}",
                f"{ttfa.mean:.2f} / {ttfa.p50:.2f} / {ttfa.p99:.2f}",
                f"{side.metrics['rtf'].mean:.2f}",
                f"{side.throughput['requests']:.3f}",
                f"{side.throughput['audio_seconds']:.2f}",
            ]
        )
    return table(head, rows)


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
    rows = []
    for side, stages in level.stages.items():
        for stage, figures in stages.items():
            steps, batch = figures.steps, figures.batch
            rows.append(
                [
                    side,
                    stage,
                    f"{figures.per_busy_second:.1f} {figures.unit}/s",
                    f"{figures.utilisation:.0%}",
                    "" if steps is None else f"{steps.count} × {1000 * steps.mean:.1f} ms (p99 {1000 * steps.p99:.0f})",
                    "" if batch is None else f"{batch.mean:.1f}",
                ]
            )
    return table(["side", "stage", "while busy", "busy", "steps", "batch"], rows)


def hop_table(level: LevelResult) -> str:
    rows = [
        [edge, str(hop.count), f"{1000 * hop.mean:.2f}", f"{1000 * hop.p50:.2f}", f"{1000 * hop.p99:.2f}"]
        for edge, hop in level.hops.items()
    ]
    return table(["edge", "chunks", "mean (ms)", "p50 (ms)", "p99 (ms)"], rows) if rows else ""


def usage_table(level: LevelResult) -> str:
    rows = []
    for side, usage in level.usage.items():
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in usage.cpu_seconds.items())
        rows.append([side, f"{usage.peak_pss_bytes / MIB:.0f} MiB", spent, f"{usage.others_cpu_seconds:.1f}"])
    return table(["side", "peak memory (PSS)", "CPU seconds by process", "CPU seconds of the others meanwhile"], rows)


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
    axes.set_title(f"concurrency {level.concurrency}")
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
