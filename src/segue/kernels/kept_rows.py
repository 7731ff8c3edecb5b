"""Layers over rows that come again: what was made of a row is kept, and found by the row's content.

A denoiser's blocks are modulated by layers over the embedding of the timestep alone. Branches of guidance, requests
with equal numbers of steps and whoever comes later ask for the same timesteps again and again, and in a small call the
weights of these layers are a third of all that is read from memory.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from segue.kernels.recorder import anew

MOST_ROWS = 128
"""Kept per layer: the timesteps of a few numbers of steps. Of a layer with as many inputs they take as much memory as
its weight."""


class RowNames:
    """Rows by their content, for many layers over one tensor."""

    def __init__(self) -> None:
        self._given = b""
        """The last."""
        self._names: list[bytes] = []

    def of(self, x: torch.Tensor) -> list[bytes]:
        """x: [rows, features] on the CPU, of a dtype that numpy knows."""
        rows = x.numpy(force=True)
        given = rows.tobytes()
        if self._given != given or len(self._names) != len(rows):
            self._names = [row.tobytes() for row in rows]
            self._given = given
        return self._names


class KeptRows(nn.Module):
    """A layer that makes each row of its output of the same row of its input, and nothing else."""

    def __init__(self, inner: nn.Module, names: RowNames, features: int, most: int = MOST_ROWS) -> None:
        """`features`: of its output, in float32."""
        super().__init__()
        self.inner = inner
        self.most_bytes = most * features * 4
        """That it will ever keep."""
        self._names = names
        self._most = most
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        """[features of the output] by row, the one that was used longest ago first."""

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


def kept_rows_bytes(network: nn.Module) -> int:
    """What the layers of `network` will keep at most."""
    return sum(module.most_bytes for module in network.modules() if isinstance(module, KeptRows))
