"""`python -m demo_model COMMAND DIRECTORY`: train the model, all parts at once or one by one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from demo_model.training.checkpoint import create
from demo_model.training.schedule import PARTS, Options, assemble, limits, train_all, train_one


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo_model", description=__doc__)
    parser.add_argument("command", choices=["create", "all", *PARTS, "assemble"])
    parser.add_argument("directory", type=Path, help="the checkpoint; what is needed to resume lies in its `training`")
    parser.add_argument("--minutes", type=float, help="train for so long, not to a step; of `all`, everything")
    parser.add_argument("--steps", type=int, help="of each part, from where the checkpoint began")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of `all`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 1) - 2, 1), help="processes that make data"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the process that trains")
    given = parser.parse_args()
    options = Options(given.directory, torch.device(given.device), given.workers, given.threads)
    if not (given.directory / "config.json").exists():
        create(given.directory)
    options.training.mkdir(exist_ok=True)
    if given.command == "create":
        return
    try:
        if given.command == "all":
            train_all(options, given.parts, given.steps, given.minutes)
        elif given.command in PARTS:
            train_one(given.command, options, limits(given.command, given.steps, given.minutes))
    finally:
        assemble(options)  # of what has been learned until it was stopped, or failed


if __name__ == "__main__":
    main()
