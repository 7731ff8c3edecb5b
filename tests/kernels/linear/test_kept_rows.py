"""Layers that keep what they made of a row: the same answers, each row computed once while it is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from segue.kernels.linear.kept_rows import KeptRows, RowNames
from segue.kernels.prepare import prepared_bytes


class Counted(nn.Module):
    """Notes how many rows each of its calls has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        made = self.linear(x)
        assert isinstance(made, torch.Tensor)
        return made


@pytest.fixture
def layer() -> Counted:
    torch.manual_seed(0)
    return Counted().requires_grad_(False)


def test_each_row_is_computed_once(layer: Counted) -> None:
    kept, rows = KeptRows(layer, RowNames(), 5), torch.randn(4, 3)
    for places in ([0, 0, 1], [1, 0], [2, 1, 3, 2], [3]):
        torch.testing.assert_close(kept(rows[places]), layer.linear(rows[places]))
    assert layer.calls == [2, 2]


def test_the_row_used_longest_ago_is_forgotten_first(layer: Counted) -> None:
    kept, rows = KeptRows(layer, RowNames(), 5, most=2), torch.randn(3, 3)
    for places in ([0, 1], [0], [2], [0], [1]):
        torch.testing.assert_close(kept(rows[places]), layer.linear(rows[places]))
    assert layer.calls == [2, 1, 1], "rows 0 and 1, row 2 in the place of 1, row 1 again"


def test_a_call_of_more_rows_than_are_kept_is_answered_whole(layer: Counted) -> None:
    kept, rows = KeptRows(layer, RowNames(), 5, most=2), torch.randn(5, 3)
    torch.testing.assert_close(kept(rows), layer.linear(rows))


def test_layers_that_share_names_keep_rows_of_their_own(layer: Counted) -> None:
    names, other = RowNames(), nn.Linear(3, 2).requires_grad_(False)
    first, second, rows = KeptRows(layer, names, 5), KeptRows(other, names, 2), torch.randn(2, 3)
    for x in (rows, rows, rows.flip(0)):
        torch.testing.assert_close(first(x), layer.linear(x))
        torch.testing.assert_close(second(x), other(x))


def test_what_is_given_out_is_not_what_is_kept(layer: Counted) -> None:
    kept, rows = KeptRows(layer, RowNames(), 5), torch.randn(1, 3)
    expected = kept(rows).clone()
    kept(rows).zero_()
    torch.testing.assert_close(kept(rows), expected)


def test_what_is_kept_is_known_before(layer: Counted) -> None:
    names = RowNames()
    both = nn.ModuleList([KeptRows(layer, names, 5, most=2), KeptRows(nn.Linear(3, 2), names, 2, most=2)])
    assert prepared_bytes(both) == 2 * (5 + 2) * 4
