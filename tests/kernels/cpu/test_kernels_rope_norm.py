"""RMS norms and rotary positions in place: the compiled kernels beside torch, in every instruction set."""

from __future__ import annotations

import pytest
import torch

from segue.kernels.cpu.native import Library, libraries
from segue.kernels.cpu.norms import norm_and_rope as compiled_norm_and_rope
from segue.kernels.cpu.recorder import record
from segue.kernels.operations import norm_and_rope

EVERY = [pytest.param(kernels, id=str(kernels.number)) for kernels in libraries()]


@pytest.mark.parametrize("kernels", EVERY)
@pytest.mark.parametrize("width", [8, 20, 64, 130])
@pytest.mark.parametrize("rotated", [False, True])
def test_beside_torch(kernels: Library, width: int, rotated: bool) -> None:
    whole = torch.randn(3, 50, 2, 4, width)
    weight = torch.randn(width)
    rotations = torch.polar(torch.rand(43, width // 2) + 0.5, torch.randn(43, width // 2)) if rotated else None
    expected = whole.double()  # by torch's operators
    norm_and_rope(expected[:, 7:, 1], weight.double(), 1e-6, rotations)
    assert not torch.allclose(expected[:, 7:, 1].float(), whole[:, 7:, 1])
    compiled_norm_and_rope(kernels, whole[:, 7:, 1], weight, 1e-6, rotations)
    torch.testing.assert_close(whole, expected.float(), rtol=1e-5, atol=1e-5)


def test_as_the_library_does_it() -> None:
    from diffusers.models.normalization import RMSNorm
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    x, norm = torch.randn(2, 9, 3, 16), RMSNorm(16, 1e-5)
    torch.nn.init.normal_(norm.weight)
    rotations = torch.polar(torch.ones(9, 8), torch.randn(9, 8))
    expected = apply_rotary_emb_qwen(norm(x), rotations, use_real=False)
    for dtype in (torch.float32, torch.float64):
        made = x.to(dtype, copy=True)
        norm_and_rope(made, norm.weight.detach().to(dtype), norm.eps, rotations)
        torch.testing.assert_close(made.float(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
def test_it_is_played_back() -> None:
    kernels, weight = libraries()[0], torch.randn(16)
    rotations = torch.polar(torch.ones(5, 8), torch.randn(5, 8))
    x = torch.randn(1, 5, 3, 16)

    def run() -> torch.Tensor:
        made = x * 1
        compiled_norm_and_rope(kernels, made, weight, 1e-6, rotations)
        compiled_norm_and_rope(kernels, made, weight, 1e-6, None)
        return made

    recording, _ = record(kernels, run)
    x.normal_()
    recording()
    assert recording.calls == (3, 0)
    assert torch.equal(recording.result, run())
