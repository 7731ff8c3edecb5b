"""Convolutions over patches that are cut already, as linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from segue.kernels.linear.patches import PatchConv, embed_patches


@torch.inference_mode()
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_a_patch_gives_the_same_and_a_picture_is_still_cut(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    size = (4, 3) if kind is nn.Conv2d else (2, 4, 3)
    net = nn.Sequential(kind(5, 7, kernel_size=size, stride=size), nn.Identity())
    patches, picture = torch.randn(9, 5, *size), torch.randn(2, 5, *(3 * side for side in size))
    expected = [net(patches), net(picture)]
    assert embed_patches(net) == 1
    assert isinstance(net[0], PatchConv)
    for given, wanted in zip((patches, picture), expected, strict=True):
        torch.testing.assert_close(net(given), wanted, rtol=1e-5, atol=1e-5)
        assert net(given).shape == wanted.shape
    assert net[0].weight.shape == (7, 5, *size)


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
