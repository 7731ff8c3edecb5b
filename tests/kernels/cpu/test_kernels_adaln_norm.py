"""Norms with adaLN modulation equal torch's operators, with every instruction set of this CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from segue.kernels.cpu.native import Library, libraries
from segue.kernels.cpu.norms import modulated_norm as compiled_norm
from segue.kernels.operations import modulated_norm


@pytest.mark.parametrize("kernels", libraries(), ids=lambda one: f"set {one.number}")
@pytest.mark.parametrize(("batch", "tokens", "width"), [(1, 5, 384), (3, 40, 384), (2, 7, 50), (3, 1, 3), (2, 0, 16)])
def test_it_equals_torchs(kernels: Library, batch: int, tokens: int, width: int) -> None:
    x = torch.randn(batch, width, tokens).transpose(1, 2) * 3 + 100
    shift, scale, _ = torch.randn(batch, 1, 3 * width).chunk(3, -1)
    wanted = functional.layer_norm(x.double(), (width,), eps=1e-6) * (1 + scale.double()) + shift.double()
    doubles = (tensor.double() for tensor in (x, scale, shift))
    torch.testing.assert_close(modulated_norm(*doubles, 1e-6), wanted)  # by torch's operators
    torch.testing.assert_close(compiled_norm(kernels, x, scale, shift, 1e-6), wanted.float(), rtol=1e-4, atol=1e-4)
    other = compiled_norm(kernels, x, scale, shift[:1].expand(batch, 1, width), 1e-6)
    torch.testing.assert_close(other, (wanted - shift.double() + shift[:1]).float(), rtol=1e-4, atol=1e-4)


def test_rows_do_not_change_each_other() -> None:
    x, scale, shift = torch.randn(3, 9, 384), torch.randn(3, 1, 384), torch.randn(3, 1, 384)
    x[1] = torch.nan
    made = modulated_norm(x, scale, shift, 1e-6)
    assert made[1].isnan().all()
    for row in (0, 2):
        alone = (tensor[row : row + 1] for tensor in (x, scale, shift))
        assert torch.equal(made[row : row + 1], modulated_norm(*alone, 1e-6))
