"""Build the cross-attention inputs of one decoder step: each token attends to its own request's window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import Prompt
from segue.kernels.attention.cross_attention import CrossStep, KeysValues, Look
from segue.kernels.staging import upload
from segue.models.shared.decoder.decoder import ENCODER_STATES
from segue.models.shared.decoder.kept_media import KeptMedia


@dataclass(frozen=True, slots=True)
class Window:
    """`Prompt.cross_inputs`: the encoder states of a request's window."""

    key: bytes
    rows: torch.Tensor
    """[n, H]: the encoder states."""


@dataclass(slots=True)
class _StepWindows:
    """Receives keys and values from the layers, and returns those of any window of the step."""

    kept: KeptMedia
    missing: list[tuple[bytes, int]]
    """Windows without kept keys and values, with their number of rows."""
    _now: dict[bytes, KeysValues] = field(default_factory=dict)
    """Keys and values of the running layer that do not fit into the kept memory."""

    def made(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._now = self.kept.put_all(layer, self.missing, keys, values) if self.missing else {}

    def of(self, layer: int, key: bytes) -> KeysValues:
        own = self._now.get(key)
        return self.kept.get(layer, key) if own is None else own


def step_windows(
    prompts: Sequence[tuple[Prompt | None, int, int]], kept: KeptMedia, example: torch.Tensor
) -> dict[str, Any]:
    """Further arguments of the decoder's forward for a flat batch of these tokens; if no request has a window, all
    tokens attend to the `example` [1, n, H]."""
    windows: dict[bytes, torch.Tensor] = {}
    places: dict[bytes, list[np.ndarray]] = {}
    begin = 0
    for prompt, start, stop in prompts:
        if prompt is not None and isinstance(prompt.cross_inputs, Window):
            window = prompt.cross_inputs
            windows[window.key] = window.rows
            places.setdefault(window.key, []).append(np.arange(begin, begin + stop - start))
        begin += stop - start
    if not windows:  # the engine's trial runs have no windows
        return {ENCODER_STATES: example}
    sizes: Mapping[bytes, int] = {key: len(rows) for key, rows in windows.items()}
    missing = kept.begin(sizes)
    step = _StepWindows(kept, [(key, sizes[key]) for key in missing])
    looks = [Look(upload(np.concatenate(at), example.device), ((key, sizes[key]),)) for key, at in places.items()]
    first = next(iter(windows.values()))
    rows = torch.cat([windows[key] for key in missing]) if missing else first[:0]
    return {ENCODER_STATES: rows.to(example)[None], "across": CrossStep(frozenset(), looks, step.of, step.made)}
