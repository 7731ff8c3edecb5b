"""What all parts of the training share: steps that can be resumed, their log, and the checkpoint at the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WARM_UP = 100
"""Steps in which the learning rate rises."""
SAVED_EVERY = 60.0
"""Seconds."""


@dataclass(frozen=True)
class Part:
    """One part of the training.

    `modules` are trained, everything else stays. `batch` makes the data of a step from its number alone, in a process
    of its own, so that a resumed training sees what an uninterrupted one does. `loss` gives the loss and values to log.
    """

    name: str
    modules: Sequence[nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, int], tuple[Tensor, dict[str, float]]]
    rate: float = 1e-3


class _Steps(Dataset[Any]):
    """Batches by number."""

    def __init__(self, batch: Callable[[int], Any], first: int, last: int) -> None:
        self._batch, self._first, self._last = batch, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Any:
        torch.set_num_threads(1)
        return self._batch(self._first + index)


def train(part: Part, steps: int, directory: Path, *, minutes: float = math.inf) -> bool:
    """Train until step `steps`, or for `minutes`; go on from what an earlier call left. Returns whether it is finished.

    Writes `<name>.pt`, what is needed to resume, and `<name>.jsonl`, the log, into `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    left, log = directory / f"{part.name}.pt", directory / f"{part.name}.jsonl"
    modules = nn.ModuleList(part.modules)
    parameters = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=part.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    first = 0
    if left.exists():
        found = torch.load(left, weights_only=True)
        modules.load_state_dict(found["weights"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    begun = saved = time.monotonic()
    step, recent = first, []
    for step, batch in enumerate(_batches(part, first, steps), first):
        for group in optimizer.param_groups:
            group["lr"] = part.rate * _share(step, steps)
        loss, values = part.loss(batch, step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        recent.append({"loss": loss.item(), **values})
        now = time.monotonic()
        if (step + 1) % 20 == 0:
            _write(log, {"step": step + 1, "seconds": round(now - begun, 1), **_means(recent)})
            recent = []
        over = now - begun > minutes * 60
        if now - saved > SAVED_EVERY or over or step + 1 == steps:
            _save(left, modules, optimizer, step + 1)
            saved = now
        if over:
            break
    return step + 1 >= steps


def _batches(part: Part, first: int, steps: int) -> Iterable[Any]:
    return DataLoader(_Steps(part.batch, first, steps), batch_size=None, num_workers=1, prefetch_factor=4)


def _share(step: int, steps: int) -> float:
    """Of the learning rate: a short rise, then half a cosine down to a twentieth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2


def _save(path: Path, modules: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    beside = path.with_suffix(".new")
    torch.save({"weights": modules.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, beside)
    beside.replace(path)


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: round(sum(values) / len(values), 4) for name, values in found.items()}


def _write(path: Path, row: dict[str, float]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(path.stem, row, flush=True)
