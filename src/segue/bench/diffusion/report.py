"""Format a result of `segue bench diffusion`: Markdown tables and a plot."""

from __future__ import annotations

from pathlib import Path

from segue.bench.diffusion.results import DiffusionResult, DiffusionScenario
from segue.bench.harness.load_report import drawn, head, table


def markdown(result: DiffusionResult) -> str:
    """The whole result, as tables."""
    settings = result.settings
    title = f"{settings.pipeline} ({settings.model}), {settings.dtype}"
    run = (
        f"{settings.threads} threads per side; guidance {settings.guidance:g}. "
        f"A matmul of large matrices reaches {settings.ceiling / 1e9:.0f} GFLOP/s."
    )
    parts = head(result, title, settings.versions, run, settings.rounds, settings.seed)
    for scenario in result.scenarios:
        parts += [f"### {scenario.name}", scenario_table(scenario)]
    return "\n\n".join(parts) + "\n"


def scenario_table(scenario: DiffusionScenario) -> str:
    columns = ["side", "images/s", "Segue over it", "steps/s", "JCT mean / p50 / p99 (s)", "mean JCT of Segue over it"]
    columns += ["first image (s)", "of the ceiling, all / denoiser", "memory (MiB)", "difference, mean / largest"]
    own = next(iter(scenario.sides.values()))
    rows = []
    for number, (side, figures) in enumerate(scenario.sides.items()):
        faster = own.images_per_second / figures.images_per_second
        shorter = own.jct.mean / figures.jct.mean
        rows.append(
            [
                side,
                f"{figures.images_per_second:.3f}",
                f"{faster:.2f}×" if number else "",
                f"{figures.steps_per_second:.2f}",
                " / ".join(f"{value:.2f}" for value in (figures.jct.mean, figures.jct.p50, figures.jct.p99)),
                f"{shorter:.0%}" if number else "",
                f"{figures.first_preview.mean:.2f}",
                f"{figures.of_ceiling:.0%}"
                + ("" if figures.network_of_ceiling is None else f" / {figures.network_of_ceiling:.0%}"),
                f"{figures.pss_bytes / 2**20:.0f}",
                f"{figures.mean_difference:.4f} / {figures.largest_difference:.4f}" if number else "",
            ]
        )
    return table(columns, rows)


def plot(result: DiffusionResult, path: Path) -> None:
    """Left: images per second. Right: mean time per image."""
    title = f"{result.settings.pipeline}, {result.settings.dtype}, {result.finished[:10]}"
    with drawn(path, title, (15, 1.5 + 0.7 * max(4, len(result.scenarios))), columns=2) as [[speeds, times]]:
        sides = list(dict.fromkeys(side for scenario in result.scenarios for side in scenario.sides))
        height = 0.8 / len(sides)
        for number, side in enumerate(sides):
            own = [(place, one.sides[side]) for place, one in enumerate(result.scenarios) if side in one.sides]
            places = [place + number * height for place, _ in own]
            for axes, values in (
                (speeds, [figures.images_per_second for _, figures in own]),
                (times, [figures.jct.mean for _, figures in own]),
            ):
                axes.bar_label(axes.barh(places, values, height, label=side), fmt="%.2f", fontsize=7)
        names = [one.name.replace(", ", "\n", 1) for one in result.scenarios]
        for axes in (speeds, times):
            axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names, fontsize=7)
            axes.invert_yaxis()
        speeds.set_xlabel("images per second")
        times.set_xlabel("mean seconds until an image is there")
        speeds.legend(fontsize=8)
