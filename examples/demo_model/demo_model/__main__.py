"""`python -m demo_model COMMAND DIRECTORY`: train the model, part by part."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from demo_model import see
from demo_model.checkpoint import create
from demo_model.training import train
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration

STEPS = {"vision": 2000, "answers": 6000}


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo_model", description=__doc__)
    parser.add_argument("command", choices=["create", *STEPS])
    parser.add_argument("directory", type=Path, help="the checkpoint; what is needed to resume lies in its `training`")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long, to be resumed")
    parser.add_argument("--steps", type=int, help="of this part")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.command == "create":
        create(options.directory)
        return
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(options.directory, dtype=torch.float32)
    model.train()
    part = see.encoder_part(model) if options.command == "vision" else see.answers_part(model, options.directory)
    steps = options.steps or STEPS[options.command]
    train(part, steps, options.directory / "training", minutes=options.minutes)
    model.save_pretrained(options.directory)


if __name__ == "__main__":
    main()
