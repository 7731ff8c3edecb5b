"""Convolutions over patches that are cut already, as linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.patches import PatchConv, embed_patches
from segue.kernels.prepare import Plan, prepare


@torch.inference_mode()
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_a_patch_gives_the_same_and_by_itself(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    size = (4, 3) if kind is nn.Conv2d else (2, 4, 3)
    net = nn.Sequential(kind(5, 7, kernel_size=size, stride=size), nn.Identity())
    patches = torch.randn(9, 5, *size)
    expected = net(patches)
    prepare(net, torch.device("cpu"), Plan(rows=8, patches=True))
    assert isinstance(net[0], PatchConv)
    torch.testing.assert_close(net(patches), expected, rtol=1e-5, atol=1e-5)
    assert net(patches).shape == expected.shape
    assert net[0].weight.dtype == torch.float32
    if cpu_kernels() is not None:
        assert torch.equal(torch.cat([net(patch) for patch in patches.split(1)]), net(patches))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(4, 4, 2, stride=2, dilation=2),
        nn.Conv1d(4, 4, 2, stride=2),
    ],
)
def test_others_stay(conv: nn.Module) -> None:
    assert embed_patches(nn.Sequential(conv)) == 0
