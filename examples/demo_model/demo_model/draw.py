"""`python -m demo_model.draw DIRECTORY`: train a small pipeline that draws and edits scenes, all parts or some."""

from __future__ import annotations

import argparse
import math
from itertools import chain
from pathlib import Path

import torch

from demo_model.training import draw
from demo_model.training.schedule import HALF
from demo_model.training.steps import LOG, Limits, logged, train

SIZES = {
    "cpu": {"vae": 16, "words": 192, "flow": 16, "decoder": 16},
    "cuda": {"vae": 32, "words": 512, "flow": 64, "decoder": 32},
}
"""Pictures, or texts, of a batch."""
SHARES = {"vae": 0.25, "words": 0.05, "flow": 0.6, "decoder": 0.1}
"""Parts, in an order in which each finds what it needs, and their shares of the time."""


def parts_left(training: Path) -> list[str]:
    """From the last part that has begun: an earlier one would change what it has learned from."""
    begun = [number for number, name in enumerate(SHARES) if logged(training / LOG, name)]
    return [*SHARES][max(begun, default=0) :]


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo_model.draw", description=__doc__)
    parser.add_argument("directory", type=Path, help="the checkpoint; what is needed to resume lies in its `training`")
    parser.add_argument(
        "--parts", nargs="+", choices=SHARES, help="which; without: all, in this order, from the last that has begun"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="of all these parts")
    parser.add_argument("--steps", type=float, default=math.inf, help="of each part, where there is time enough")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--compile", action="store_true", help="needs a C++ compiler and minutes, then steps are faster"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes that make data")
    options = parser.parse_args()
    directory, device, training = options.directory, options.device, options.directory / "training"
    if math.inf == options.minutes == options.steps:
        parser.error("give --minutes or --steps")
    if not (directory / "model_index.json").exists():
        draw.create(directory)
    training.mkdir(exist_ok=True)
    made = draw.networks(directory).to(device)
    if options.compile:
        for layer in chain(made["transformer"].transformer_blocks, made["transformer"].single_transformer_blocks):
            layer.compile(dynamic=False)
    makers = {
        "vae": draw.vae_part,
        "words": draw.reading_part,
        "flow": draw.flow_part,
        "decoder": draw.decoder_part,
    }
    parts = options.parts or parts_left(training)
    whole = sum(SHARES[name] for name in parts)
    for name in parts:
        limits, where = Limits(options.steps, options.minutes * SHARES[name] / whole), torch.device(device)
        part = makers[name](made, directory, size=SIZES[device][name])
        train(part, limits, training, device=where, workers=options.workers, half=HALF[device])
        if name == "vae":
            draw.measure(made, directory)
        draw.write(directory, made)


if __name__ == "__main__":
    main()
