"""A network whose weights workers share."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.linear import PackedLinear

WIDE = 256
IDS = torch.arange(WIDE)
WEIGHTS = 4 * 4 * WIDE * WIDE + 2 * WIDE * 2 * WIDE
"""Bytes of a network that are large enough to be shared, but for padding of packed ones."""


class Net(nn.Module):
    """A tied table, a joined weight of which two layers see a part, a half precision buffer, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDE, WIDE)
        self.head = nn.Linear(WIDE, WIDE, bias=False)
        self.head.weight = self.table.weight
        joined = torch.randn(2 * WIDE, WIDE)
        self.first, self.second = (nn.Linear(WIDE, WIDE) for _ in range(2))
        self.first.weight = nn.Parameter(joined[:WIDE])
        self.second.weight = nn.Parameter(joined[WIDE:])
        self.register_buffer("scale", torch.randn(WIDE, 2 * WIDE).half().t())
        self.packed: nn.Module = nn.Linear(WIDE, WIDE)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.table(ids)))
        return self.head(self.packed(x)) @ self.scale[:WIDE].float()


def net(seed: int = 0, device: str = "cpu") -> Net:
    torch.manual_seed(seed)
    made = Net().eval()
    if device == "cpu" and cpu_kernels() is not None:  # in panels, as a stage's network is
        made.packed = PackedLinear(made.packed, 8)  # type: ignore[arg-type]
    return made.to(device)


def places(network: nn.Module) -> dict[str, str]:
    """Tensor → how its memory is mapped, and of what: `rw-p /memfd:segue-weights`."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in line[0].split("-")), f"{line[1]} {''.join(line[5:6])}") for line in lines]
    return {
        name: next(how for start, end, how in spans if start <= tensor.data_ptr() < end)
        for name, tensor in network.state_dict(keep_vars=True).items()
    }


def descriptors() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))
