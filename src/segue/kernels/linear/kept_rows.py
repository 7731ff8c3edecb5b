"""Caches a layer's output rows by the content of the input rows, for inputs that repeat.

The adaLN modulation of a denoiser's blocks is computed by layers over the timestep embedding alone. Guidance branches,
requests with equal numbers of steps and later requests use the same timesteps again and again, and in a small call the
weights of these layers are a third of all memory reads.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from segue.kernels.graphs.replay import anew

MOST_ROWS = 128
"""Rows cached per layer: the timesteps of a few numbers of steps. For a layer with this many inputs they take as much
memory as its weight."""


class RowNames:
    """Keys of rows by content, for many layers that take the same tensor."""

    def __init__(self) -> None:
        self._given = b""
        """The last tensor's bytes."""
        self._names: list[bytes] = []

    def of(self, x: torch.Tensor) -> list[bytes]:
        """x: [rows, features] on the CPU, of a dtype that numpy supports."""
        rows = x.numpy(force=True)
        given = rows.tobytes()
        if self._given != given or len(self._names) != len(rows):
            self._names = [row.tobytes() for row in rows]
            self._given = given
        return self._names


class KeptRows(nn.Module):
    """Wraps a layer whose output rows each depend only on the same row of its input."""

    def __init__(self, inner: nn.Module, names: RowNames, features: int, most: int = MOST_ROWS) -> None:
        """`features`: of its output, in float32."""
        super().__init__()
        self.inner = inner
        self.most_bytes = most * features * 4
        """Most bytes that it ever caches."""
        self._names = names
        self._most = most
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        """Output row [features] by key, the least recently used first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, features] → [rows, features of the output]."""
        return anew(self._rows, x)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        names = self._names.of(x)
        places = {name: place for place, name in enumerate(names) if name not in self._kept}
        if places:
            made = self.inner(x[list(places.values())])
            self._kept.update(zip(places, (row.clone() for row in made), strict=True))
        rows = [self._kept[name] for name in names]
        for name in names:
            self._kept.move_to_end(name)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return torch.stack(rows)
