"""Format a result of `segue bench diffusion`: Markdown tables and a plot."""

from __future__ import annotations

from pathlib import Path

from segue.bench.diffusion.results import DiffusionResult, DiffusionScenario, DiffusionSide
from segue.bench.harness.report import NamedColumns, bars, drawn, host, page, startup_table, table_by, three


def markdown(result: DiffusionResult) -> str:
    """The whole result, as tables."""
    settings = result.settings
    parts = [
        f"## {settings.pipeline} ({settings.model}), {settings.dtype}, {result.finished[:10]}",
        f"{host(result.machine, settings.versions)} {settings.threads} threads per side; guidance "
        f"{settings.guidance:g}. A matmul of large matrices reaches {settings.ceiling / 1e9:.0f} GFLOP/s. "
        f"{settings.rounds} rounds, sides in turn; seed {settings.seed}.",
        *result.unfinished,
        startup_table(result.startup),
    ]
    for scenario in result.scenarios:
        parts += [f"### {scenario.name}", scenario_table(scenario)]
    return page(parts)


def scenario_table(scenario: DiffusionScenario) -> str:
    own = next(iter(scenario.sides.values()))

    def ceilings(one: DiffusionSide) -> str:
        network = "" if one.network_of_ceiling is None else f" / {one.network_of_ceiling:.0%}"
        return f"{one.of_ceiling:.0%}{network}"

    columns: NamedColumns[DiffusionSide] = {
        "images/s": lambda _, one: f"{one.images_per_second:.3f}",
        "Segue over it": lambda _, one: "" if one is own else f"{own.images_per_second / one.images_per_second:.2f}×",
        "steps/s": lambda _, one: f"{one.steps_per_second:.2f}",
        "JCT mean / p50 / p99 (s)": lambda _, one: three(one.jct),
        "mean JCT of Segue over it": lambda _, one: "" if one is own else f"{own.jct.mean / one.jct.mean:.0%}",
        "first image (s)": lambda _, one: f"{one.first_preview.mean:.2f}",
        "of the ceiling, all / denoiser": lambda _, one: ceilings(one),
        "memory (MiB)": lambda _, one: f"{one.pss_bytes / 2**20:.0f}",
        "difference, mean / largest": lambda _, one: (
            "" if one is own else f"{one.mean_difference:.4f} / {one.largest_difference:.4f}"
        ),
    }
    return table_by("side", scenario.sides, columns)


def plot(result: DiffusionResult, path: Path) -> None:
    """Left: images per second. Right: mean time per image."""
    title = f"{result.settings.pipeline}, {result.settings.dtype}, {result.finished[:10]}"
    with drawn(path, title, (15, 1.5 + 0.7 * max(4, len(result.scenarios))), columns=2) as [[left, right]]:
        bars(left, result.scenarios, lambda side: side.images_per_second, "images per second", 2)
        bars(right, result.scenarios, lambda side: side.jct.mean, "mean seconds until an image is there", 2)
