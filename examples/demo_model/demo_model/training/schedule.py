"""Which parts the training has, what each needs, and which run at the same time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.training import codec, hear, see, speak
from demo_model.training.networks import Qwen3OmniMoeForConditionalGeneration, prepare
from demo_model.training.steps import Limits, Part, learn, restore, train

PARTS = ("codec", "vocoder", "vision", "dictation", "answers", "hearing", "speaking")
"""In an order in which each finds what it needs; what a later one has learned counts."""
STEPS = {"vision": 2000, "answers": 4000, "dictation": 4000, "hearing": 3000, "vocoder": 5000, "speaking": 5000}
"""Of those that learn in steps."""
SIZES = {
    "cpu": {"vision": 48, "answers": 16, "dictation": 16, "hearing": 12, "codec": 1000, "vocoder": 10, "speaking": 8},
    "cuda": {
        "vision": 256,
        "answers": 128,
        "dictation": 64,
        "hearing": 64,
        "codec": 1000,
        "vocoder": 24,
        "speaking": 64,
    },
}
"""Pictures, sequences or recordings of a batch; of the codec all."""
NEEDS = {"answers": ("vision",), "hearing": ("answers", "dictation"), "speaking": ("codec",), "vocoder": ("codec",)}
LINES: dict[str, tuple[dict[str, float], ...]] = {
    "cpu": (
        {"vision": 0.15, "answers": 0.65, "hearing": 1.0},
        {"dictation": 0.15, "codec": 0.2, "vocoder": 0.55, "speaking": 1.0},
    ),
    "cuda": (
        {"vision": 0.15, "answers": 0.5, "hearing": 1.0},
        {"codec": 0.1, "vocoder": 0.55, "speaking": 1.0},
        {"dictation": 0.5},
    ),
}
"""Parts that one process trains in turn, and which share of the time is over when each must end; lines run at once."""
WORKERS = {"vision": 0.36, "answers": 0.36, "dictation": 0.36, "vocoder": 0.28, "hearing": 0.65, "speaking": 0.35}
"""Which share of the processes that make data a part gets while others run: recordings take the longest."""
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
"""Environment of the processes that train: else glibc gives the memory of large tensors back, and on a CPU it can take
longer to get it anew in every step than to compute."""
SHARD = "15MB"
"""The largest file of weights."""
HALF = {"cpu": torch.cpu._is_amx_tile_supported(), "cuda": False}
"""Whether products are computed in bfloat16: where they are faster by so much that it can be measured."""
_OWN = "own.safetensors"
"""What only the training needs of finished parts; lies beside their logs."""


@dataclass(frozen=True)
class Options:
    directory: Path
    device: torch.device
    workers: int
    threads: int

    @property
    def training(self) -> Path:
        return self.directory / "training"


def limits(part: str, steps: int | None, minutes: float | None) -> Limits:
    if minutes is not None:
        return Limits(steps or math.inf, minutes)
    return Limits(steps or STEPS.get(part, math.inf))


def train_one(name: str, options: Options, given: Limits) -> None:
    """Train one part on what the parts before it have learned."""
    torch.set_num_threads(options.threads)
    if options.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # its fast products; the weights are small
    model = _model(options)
    prepare(model, options.device)
    part = _part(name, model, options, _parts(PARTS[: PARTS.index(name)], model, options))
    if part.once is None:
        half = HALF[options.device.type]
        train(part, given, options.training, device=options.device, workers=options.workers, half=half)
    elif not _kept(name, options):  # else others have built on it
        learn(part, options.training)


def _model(options: Options) -> Any:
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(options.directory, dtype=torch.float32)


def _parts(names: Sequence[str], model: Any, options: Options) -> dict[str, Part]:
    """The first of `PARTS`, in order, with what each has learned."""
    made: dict[str, Part] = {}
    for name in names:
        made[name] = _part(name, model, options, made)
        restore(made[name], options.training)
    return made


def _part(name: str, model: Any, options: Options, before: dict[str, Part]) -> Part:
    """A part as it begins: what it trains of the model, and its own, is what an earlier `assemble` left. `before`: the
    parts before it."""
    directory, size = options.directory, SIZES[options.device.type][name]
    if name == "vision":
        part = see.encoder_part(model, size=size)
    elif name == "answers":
        part = see.answers_part(model, directory, size=size)
    elif name == "dictation":
        part = hear.dictation_part(model, directory, size=size)
    elif name == "hearing":
        part = hear.hearing_part(model, directory, size=size)
    elif name == "codec":
        part = codec.codec_part(model, size=size)
    elif name == "vocoder":
        part = codec.vocoder_part(model, before["codec"].own, size=size)
    else:
        part = speak.speaking_part(model, directory, before["codec"].own, size=size)
    if part.own and (kept := _kept(name, options)):
        part.own.load_state_dict(kept)
    return part


def _kept(name: str, options: Options) -> dict[str, Tensor]:
    """What an earlier `assemble` kept of a part's own; empty where it has not been trained."""
    path = options.training / _OWN
    kept = load_file(path) if path.exists() else {}
    return {key.removeprefix(f"{name}."): value for key, value in kept.items() if key.startswith(f"{name}.")}


def assemble(options: Options) -> None:
    """Write what all parts have learned into the checkpoint, in bfloat16."""
    options = replace(options, device=torch.device("cpu"))
    model, own = _model(options), {}
    for name, part in _parts(PARTS, model, options).items():
        if part.own and ((options.training / f"{name}.pt").exists() or _kept(name, options)):
            own.update({f"{name}.{key}": value for key, value in part.own.state_dict().items()})
    model.to(torch.bfloat16).save_pretrained(options.directory, max_shard_size=SHARD)
    if (options.directory / "model.safetensors.index.json").exists():
        (options.directory / "model.safetensors").unlink(missing_ok=True)  # the untrained one, which would count
    save_file({key: value.to(torch.bfloat16).contiguous() for key, value in own.items()}, options.training / _OWN)


def train_all(options: Options, parts: Sequence[str], steps: int | None, minutes: float | None) -> None:
    """Train several parts, those of different lines at the same time, each in a process of its own.

    Raises `RuntimeError` if one of them fails, and ends the others.
    """
    os.environ.update(KEEPS_MEMORY)
    context = torch.multiprocessing.get_context("spawn")
    whole = LINES[options.device.type]
    last = max(line[part] for line in whole for part in line if part in parts)
    waiting = [[part for part in line if part in parts] for line in whole]
    left, running, begun = set(parts), dict[int, tuple[Any, list[str], str]](), time.monotonic()
    while left:
        for line, ends in zip(waiting, whole, strict=True):
            busy = any(line is other for _, other, _ in running.values())
            if not line or busy or left.intersection(NEEDS.get(line[0], ())):
                continue
            name = line.pop(0)
            allowed = (
                None if minutes is None else max(minutes * ends[name] / last - (time.monotonic() - begun) / 60, 0.0)
            )
            workers = max(round(options.workers * WORKERS.get(name, 0.0)), 1)
            alone = replace(options, workers=workers, threads=max(options.threads // len(whole), 1))
            given = (name, alone, limits(name, steps, allowed))
            process = context.Process(target=train_one, args=given)
            process.start()
            running[process.sentinel] = process, line, name
        for sentinel in wait(list(running)):
            process, _, name = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            if process.exitcode:
                for other, _, _ in running.values():
                    other.terminate()
                raise RuntimeError(f"the training of {name} ended with {process.exitcode}; its message is above")
            left.remove(name)
