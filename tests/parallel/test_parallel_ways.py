"""The groups of a denoiser's ranks, which meet in threads: who is in each, and which are not made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from segue.parallel.group import Group
from segue.parallel.ways import Shape, Ways, meet

CPU = torch.device("cpu")
GROUPS = ("network", "weights", "tokens", "heads")


def met(shape: Shape, meeting: Path) -> list[tuple[Ways, dict[str, list[int]]]]:
    """By rank: its ways, and by group the ranks that its members gather."""
    found: dict[int, tuple[Ways, dict[str, list[int]]]] = {}

    def come(rank: int) -> None:
        ways = meet(rank, shape, meeting, CPU)
        groups: dict[str, Group | None] = {name: getattr(ways, name) for name in GROUPS}
        mine = torch.tensor([rank])
        found[rank] = ways, {name: one.all_gather(mine).tolist() for name, one in groups.items() if one is not None}

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(shape.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(shape.size)]


def test_who_is_in_each_group(tmp_path: Path) -> None:
    everyone = met(Shape(branches=2, tokens=2, weights=2), tmp_path / "meeting")
    for rank, (ways, groups) in enumerate(everyone):
        first = rank // 4 * 4
        assert groups["network"] == list(range(first, first + 4))
        assert groups["weights"] == [rank & ~1, rank | 1]
        assert groups["tokens"] == [rank & ~2, rank | 2]
        assert groups.get("heads") == ([0, 4] if rank in (0, 4) else None)
        assert (ways.everyone.rank, ways.branch_part) == (rank, rank // 4)
        assert [ways.owner(branch) for branch in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("shape", "there"),
    [
        (Shape(branches=2), {"heads"}),
        (Shape(tokens=2), {"network", "tokens"}),
        (Shape(weights=2), {"network", "weights"}),
    ],
)
def test_one_way_has_one_group(shape: Shape, there: set[str], tmp_path: Path) -> None:
    for ways, groups in met(shape, tmp_path / "meeting"):
        assert groups.keys() == there
        assert all(getattr(ways, name) is ways.everyone for name in there)
