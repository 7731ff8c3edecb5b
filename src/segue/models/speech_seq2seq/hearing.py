"""What the tokens of a step hear: each its own request's window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import Prompt
from segue.kernels.cross_attention import CrossStep, KeysValues, Look
from segue.kernels.staging import upload
from segue.models.decoder import HEARD
from segue.models.kept_media import KeptMedia


@dataclass(frozen=True, slots=True)
class Window:
    """`Prompt.beside`."""

    key: bytes
    rows: torch.Tensor
    """[n, H]: what layers make keys and values of."""


@dataclass(slots=True)
class _StepWindows:
    """Takes keys and values as layers make them, and gives those of any window of the step."""

    kept: KeptMedia
    missing: list[tuple[bytes, int]]
    """Which windows have no keys and values yet, and their rows."""
    _now: dict[bytes, KeysValues] = field(default_factory=dict)
    """Of the layer that runs: what there is no room to keep."""

    def made(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._now = self.kept.put_all(layer, self.missing, keys, values) if self.missing else {}

    def of(self, layer: int, key: bytes) -> KeysValues:
        own = self._now.get(key)
        return self.kept.get(layer, key) if own is None else own


def step_windows(
    prompts: Sequence[tuple[Prompt | None, int, int]], kept: KeptMedia, example: torch.Tensor
) -> dict[str, Any]:
    """What the decoder's forward takes besides, for a flat batch of these tokens; where none hears anything, all hear
    the `example` [1, n, H]."""
    windows: dict[bytes, torch.Tensor] = {}
    places: dict[bytes, list[np.ndarray]] = {}
    begin = 0
    for prompt, start, stop in prompts:
        if prompt is not None and isinstance(prompt.beside, Window):
            window = prompt.beside
            windows[window.key] = window.rows
            places.setdefault(window.key, []).append(np.arange(begin, begin + stop - start))
        begin += stop - start
    if not windows:  # the engine tries the decoder out
        return {HEARD: example}
    sizes: Mapping[bytes, int] = {key: len(rows) for key, rows in windows.items()}
    missing = kept.begin(sizes)
    step = _StepWindows(kept, [(key, sizes[key]) for key in missing])
    looks = [Look(upload(np.concatenate(at), example.device), ((key, sizes[key]),)) for key, at in places.items()]
    first = next(iter(windows.values()))
    rows = torch.cat([windows[key] for key in missing]) if missing else first[:0]
    return {HEARD: rows.to(example)[None], "across": CrossStep(frozenset(), looks, step.of, step.made)}
