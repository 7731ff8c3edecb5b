"""How the processes of one replica of a denoiser share its calls, and the process groups that this takes.

Three ways, which multiply. Rank numbers count weights fastest, then tokens, then guidance branches, so that those who
exchange most are neighbours:

    rank = (branch part * tokens + token part) * weights + weight part

| group | ranks that | what goes between them |
|---|---|---|
| `everyone` | are in the replica | latents |
| `network` | compute the same rows, each a part | what a step cache decides by |
| `weights` | of these: have the same tokens | sums of products |
| `tokens` | of these: have the same weights | heads, keys and values |
| `heads` | are the first of each `network` | predictions |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from segue.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Shape:
    """Into how many parts each is divided."""

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
    """Of one rank: its groups, None where it would be alone, and its part of the branches."""

    shape: Shape
    everyone: Group
    network: Group | None
    weights: Group | None
    tokens: Group | None
    heads: Group | None
    """None as well for a rank that is no head."""

    @property
    def branch_part(self) -> int:
        return self.everyone.rank // self.shape.inner

    def owner(self, branch: int) -> int:
        """The part that computes the rows of a guidance branch: always the same."""
        return branch % self.shape.branches


def meet(rank: int, shape: Shape, meeting: Path, device: torch.device) -> Ways:
    """Waits for the other ranks, which all make the same call. `meeting`: a file no other replica has used; there will
    be more beside it."""
    everyone = Group(rank, shape.size, meeting, device)
    part, inner = divmod(rank, shape.inner)
    token, weight = divmod(inner, shape.weights)

    def group(name: str, place: int, size: int) -> Group | None:
        """The ranks of a name, of which this is number `place`. One of all ranks is not made twice."""
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
