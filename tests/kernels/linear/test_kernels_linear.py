"""Packed linear layers give what plain ones give, at every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from segue.kernels.linear.linear import PackedLinear, pack_linears


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(40, 96)
        self.inner = nn.Sequential(nn.GELU(), nn.Linear(96, 40, bias=False))
        self.head = nn.Linear(40, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.up(x)))


@pytest.mark.parametrize("shape", [(1, 40), (8, 40), (300, 40), (2, 5, 40), (0, 40)])
def test_parity(shape):
    block = Block().eval()
    x = torch.randn(shape)
    with torch.inference_mode():
        plain = block(x)
        assert pack_linears(block, 8) == 3
        torch.testing.assert_close(block(x), plain, rtol=1e-5, atol=1e-5)
    assert isinstance(block.up, PackedLinear)
    assert isinstance(block.inner[1], PackedLinear)


def test_plain_weights_are_gone():
    block = Block()
    pack_linears(block, 8)
    assert not list(block.parameters())
    assert (block.up.in_features, block.up.out_features) == (40, 96)


def test_what_is_kept_and_what_cannot_be_packed():
    block = Block()
    block.up = block.up.to(torch.bfloat16)
    assert pack_linears(block, 8, keep={"head"}) == 1
    assert type(block.head) is nn.Linear
    assert type(block.up) is nn.Linear


def test_a_wrong_number_of_inputs_is_an_error() -> None:
    """Also one that fits another layout of the same weight."""
    block = Block().eval()
    block.up.weight.data = block.up.weight.data.bfloat16().float()
    pack_linears(block, 8)
    for inputs in (20, 80):
        with pytest.raises(RuntimeError, match="a layer of 40 inputs"):
            block.up(torch.randn(2, inputs))
