"""`python -m demo_model COMMAND DIRECTORY`: train the model, part by part."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from demo_model import codec, hear, see, speak
from demo_model.checkpoint import create
from demo_model.training import Part, train
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration

STEPS = {"vision": 800, "answers": 3000, "dictation": 2000, "hearing": 2000, "codec": 1500, "speaking": 3000}


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
    part = _part(options.command, model, options.directory)
    steps = options.steps or STEPS[options.command]
    train(part, steps, options.directory / "training", minutes=options.minutes)
    model.save_pretrained(options.directory)


def _part(name: str, model: Any, directory: Path) -> Part:
    if name == "vision":
        return see.encoder_part(model)
    if name == "answers":
        return see.answers_part(model, directory)
    if name == "dictation":
        return hear.dictation_part(model, directory)
    if name == "hearing":
        return hear.hearing_part(model, directory)
    return codec.codec_part(model) if name == "codec" else speak.speaking_part(model, directory)


if __name__ == "__main__":
    main()
