"""RMSNorms are found by what they compute, in every dtype, and one kernel of torch takes their place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from segue.kernels.recognised_norms import TorchNorm, norms_by_torch

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


def networks(kind: type[nn.Module], device: str, dtype: torch.dtype) -> nn.Sequential:
    net = nn.Sequential(kind(48, eps=1e-6), nn.LayerNorm(48), kind(20, eps=1e-3)).to(device, dtype)
    nn.init.normal_(net[0].weight)
    nn.init.normal_(net[2].weight)
    return net


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_norm_is_replaced_by_one_that_gives_the_same(device: str, dtype: torch.dtype) -> None:
    net = networks(Qwen3RMSNorm, device, dtype)
    x = torch.randn(2, 7, 48).to(device, dtype)
    heads = torch.randn(1, 9, 6, 40).to(device, dtype)[..., 10:30]  # of q, as a slice of one GEMM
    x[0, 0] = 1e-4
    expected, narrow = net[0](x), net[2](heads)
    assert norms_by_torch(net, torch.device(device)) == 2
    assert [type(module) for module in net] == [TorchNorm, nn.LayerNorm, TorchNorm]
    last = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]  # one or two of the last place
    torch.testing.assert_close(net[0](x), expected, rtol=last, atol=1e-6)
    torch.testing.assert_close(net[2](heads), narrow, rtol=last, atol=1e-6)
    assert net[0](x).dtype == dtype


@torch.inference_mode()
def test_a_weight_plus_one_stays_the_librarys_where_it_would_be_rounded() -> None:
    assert norms_by_torch(networks(Gemma3RMSNorm, "cpu", torch.bfloat16), torch.device("cpu")) == 0
    net = networks(Gemma3RMSNorm, "cpu", torch.float32)
    x = torch.randn(3, 48)
    expected = net[0](x)
    assert norms_by_torch(net, torch.device("cpu")) == 2
    torch.testing.assert_close(net[0](x), expected)


def test_networks_of_several_dtypes_stay() -> None:
    net = networks(Qwen3RMSNorm, "cpu", torch.float32)
    net.append(nn.Linear(20, 4).bfloat16())
    assert norms_by_torch(net, torch.device("cpu")) == 0
