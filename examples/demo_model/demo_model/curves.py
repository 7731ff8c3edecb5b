"""Draw the log of a training: `python -m demo_model.curves DIR` writes `training.svg` beside the weights."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from demo_model.training.steps import LOG

_SMOOTHED = 15
"""Lines of the log."""


def draw(rows: list[dict[str, float | str]], path: Path) -> None:
    """One panel per part: its losses, and the shares of what is right, by step."""
    parts = list(dict.fromkeys(str(row["part"]) for row in rows))
    figure, panels = plt.subplots(2, -(-len(parts) // 2), figsize=(4 * -(-len(parts) // 2), 6), squeeze=False)
    for panel in panels.flat[len(parts) :]:
        panel.remove()
    for panel, part in zip(panels.flat, parts, strict=False):
        values = defaultdict[str, list[tuple[float, float]]](list)
        for row in rows:
            if row["part"] == part:
                for name, value in row.items():
                    if name not in ("part", "step", "seconds"):
                        values[name].append((float(row["step"]), float(value)))
        shares = panel.twinx()
        shares.set_ylim(0, 1)
        for name, points in values.items():
            share = name.endswith("right") or name.startswith(("used", "left"))
            if name == "loss" or share:
                steps, numbers = zip(*points, strict=True)
                axis, style = (shares, "-") if share else (panel, "k:")
                axis.plot(steps, _smooth(numbers), style, linewidth=0.9, label=name)
        panel.set_title(part, fontsize=9)
        panel.set_xlabel("step", fontsize=7)
        panel.set_ylabel("loss (dotted)", fontsize=7)
        if shares.lines:
            shares.legend(fontsize=5, loc="center right")
        for axis in (panel, shares):
            axis.tick_params(labelsize=6)
    figure.tight_layout()
    figure.savefig(path)


def _smooth(numbers: Sequence[float]) -> list[float]:
    """The mean of each one and those before it."""
    parts = (numbers[max(end - _SMOOTHED, 0) : end] for end in range(1, len(numbers) + 1))
    return [sum(part) / len(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    lines = (directory / "training" / LOG).read_text().splitlines()
    draw([json.loads(line) for line in lines], directory / "training.svg")


if __name__ == "__main__":
    main()
