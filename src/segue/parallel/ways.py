"""How the processes of one replica of a denoiser share its calls, and their process groups.

There are three ways of sharing, which multiply. In rank numbers, weights vary fastest, then tokens, then guidance
branches, so that ranks that exchange most are neighbours:

    rank = (branch part * tokens + token part) * weights + weight part

| group | its ranks | exchanged data |
|---|---|---|
| `everyone` | all of the replica | all predictions |
| `network` | compute the same rows, each a part | decision values of a step cache |
| `weights` | those of `network` with the same tokens | partial sums of GEMMs |
| `tokens` | those of `network` with the same weights | heads, keys and values |
| `heads` | the first of each `network` | its predictions |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from segue.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of parts for each way of sharing."""

    branches: int = 1
    tokens: int = 1
    weights: int = 1

    @property
    def inner(self) -> int:
        """Ranks that compute one row together."""
        return self.tokens * self.weights

    @property
    def size(self) -> int:
        """Ranks of a replica."""
        return self.branches * self.inner


@dataclass(frozen=True, slots=True)
class Ways:
    """The groups of one rank, None if it would be alone in one, and its part of the branches."""

    shape: Shape
    everyone: Group
    network: Group | None
    weights: Group | None
    tokens: Group | None
    heads: Group | None
    """Also None for a rank that is not the first of its `network`."""

    @property
    def branch_part(self) -> int:
        return self.everyone.rank // self.shape.inner

    def owner(self, branch: int) -> int:
        """The part that computes the rows of a guidance branch, which is always the same."""
        return branch % self.shape.branches


def meet(rank: int, shape: Shape, meeting: Path, device: torch.device) -> Ways:
    """Wait for the other ranks, which all make the same call. `meeting`: a file that no other replica has used; further
    files are created next to it."""
    everyone = Group(rank, shape.size, meeting, device)
    part, inner = divmod(rank, shape.inner)
    token, weight = divmod(inner, shape.weights)

    def group(name: str, place: int, size: int) -> Group | None:
        """The group of a name, in which this rank is number `place`. A group of all ranks is not created twice."""
        if size in (1, shape.size):
            return None if size == 1 else everyone
        return Group(place, size, Path(f"{meeting}.{name}"), device)

    return Ways(
        shape,
        everyone,
        network=group(f"network{part}", inner, shape.inner),
        weights=group(f"weights{part}.{token}", weight, shape.weights),
        tokens=group(f"tokens{part}.{weight}", token, shape.tokens),
        heads=group("heads", part, shape.branches) if inner == 0 else None,
    )
