"""A result of `segue bench diffusion` as people read it: Markdown tables and a plot."""

from __future__ import annotations

from pathlib import Path

import msgspec

from segue.bench.diffusion_results import DiffusionResult, DiffusionScenario
from segue.bench.report import table


def write_report(result: DiffusionResult, out: Path) -> list[Path]:
    """`diffusion.json`, `diffusion.md` and `diffusion.png` in a directory; gives their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{result.benchmark}.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    paths[1].write_text(markdown(result))
    plot(result, paths[2])
    return paths


def markdown(result: DiffusionResult) -> str:
    """Everything, as tables."""
    settings, machine = result.settings, result.machine
    packages = ", ".join(f"{name} {version}" for name, version in settings.versions.items())
    load = ", ".join(f"{value:.1f}" for value in machine.load_average)
    parts = [
        f"## {settings.pipeline} ({settings.model}), {settings.dtype}, {result.finished[:10]}",
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_bytes / 2**30:.0f} GiB; {machine.system}, "
        f"Python {machine.python}, {packages}. {settings.threads} threads per side; guidance {settings.guidance:g}. "
        f"A product of large matrices reaches {settings.ceiling / 1e9:.0f} GFLOP/s. Load average at the start: {load}. "
        f"{settings.rounds} rounds, sides in turn; seed {settings.seed}.",
        table(["side", "start-up (s)"], [[side, f"{seconds:.1f}"] for side, seconds in result.startup.items()]),
    ]
    for scenario in result.scenarios:
        parts += [f"### {scenario.name}", scenario_table(scenario)]
    return "\n\n".join(parts) + "\n"


def scenario_table(scenario: DiffusionScenario) -> str:
    head = ["side", "images/s", "Segue over it", "steps/s", "JCT mean / p50 / p99 (s)", "mean JCT of Segue over it"]
    head += ["first picture (s)", "of the ceiling", "memory (MiB)", "difference, mean / largest"]
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
                f"{figures.of_ceiling:.0%}",
                f"{figures.pss_bytes / 2**20:.0f}",
                f"{figures.mean_difference:.4f} / {figures.largest_difference:.4f}" if number else "",
            ]
        )
    return table(head, rows)


def plot(result: DiffusionResult, path: Path) -> None:
    """Left: pictures per second. Right: mean time until a picture is there."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (speeds, times) = pyplot.subplots(1, 2, figsize=(15, 1.5 + 0.7 * max(4, len(result.scenarios))))
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
    speeds.set_xlabel("pictures per second")
    times.set_xlabel("mean seconds until a picture is there")
    speeds.legend(fontsize=8)
    figure.suptitle(f"{result.settings.pipeline}, {result.settings.dtype}, {result.finished[:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
