"""Linear layers of denoisers after their first call: GEMMs of several, packed, and the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_chain import Chain
from torch import nn

from segue.engines.diffusion.contract import Row
from segue.graph.deployment.options import LoraPlan
from segue.kernels.linear.fused_linear import FusedPart
from segue.kernels.linear.linear import PackedLinear
from segue.kernels.prepare import Plan, prepare
from segue.models.images.flux import tiny as flux
from segue.models.images.qwen_image import tiny as qwen_image
from segue.models.images.sdxl import tiny as sdxl
from segue.models.images.stable_diffusion_3 import tiny as stable_diffusion_3
from segue.models.images.wan import tiny as wan
from segue.models.images.z_image import tiny as z_image
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser

MAKERS: dict[str, Callable[[Path], Any]] = {
    "flux": flux.make,
    "sd3": stable_diffusion_3.make,
    "z-image": z_image.make,
    "sdxl": sdxl.make,
    "wan": wan.make,
    "qwen-image": qwen_image.make,
}


def kinds(network: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in network.named_modules() if type(module) is kind]


@torch.inference_mode()
def answer(adapter: Denoiser) -> torch.Tensor:
    sample = next(adapter.trials())
    sample.latents = torch.randn(sample.latents.shape, generator=torch.Generator().manual_seed(0))
    return torch.cat(list(adapter.predict([Row(sample, 0)])))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' schedulers and numpy 2
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize("family", list(MAKERS))
def test_the_second_call_is_the_first(family: str, tmp_path: Path) -> None:
    MAKERS[family](tmp_path)
    adapter = Chain(tmp_path).adapters["denoiser"]
    assert not kinds(adapter.network, PackedLinear)
    plain = answer(adapter)
    assert set(kinds(adapter.network, nn.Linear)) == adapter.read
    parts = kinds(adapter.network, FusedPart)
    assert any(name.endswith("to_k") for name in parts)
    assert float((answer(adapter) - plain).abs().max() / plain.abs().max()) < 1e-4
    products = {part.whole.linear for part in map(adapter.network.get_submodule, parts) if isinstance(part, FusedPart)}
    assert {type(product) for product in products} == {PackedLinear}
    for product in products:
        product.register_forward_hook(lambda module, given, made: made * torch.linspace(0.5, 2, made.shape[-1]))
    assert float((answer(adapter) - plain).abs().max() / plain.abs().max()) > 1e-3, "it is in the answer"


def test_with_adapters_layers_keep_their_names(tmp_path: Path) -> None:
    qwen_image.make(tmp_path)
    network = Chain(tmp_path, lora=LoraPlan()).adapters["denoiser"].network
    assert not kinds(network, FusedPart)
    assert not kinds(network, nn.Linear)
    assert "transformer_blocks.0.img_mlp.net.0.proj.base" in kinds(network, PackedLinear)


def test_a_call_that_fails_shows_nothing() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.a(x)
            if len(x) > 2:
                raise MemoryError
            return made + self.b(x)

    pair = Pair().eval().requires_grad_(False)
    prepare(pair, torch.device("cpu"), Plan(first_call=True, rows=8))
    with pytest.raises(MemoryError):
        pair(torch.ones(3, 8))
    assert len(kinds(pair, nn.Linear)) == 2
    expected = pair(torch.ones(2, 8))
    assert kinds(pair, FusedPart) == ["a", "b"]
    torch.testing.assert_close(pair(torch.ones(2, 8)), expected)
    assert not pair._forward_hooks
    assert not pair._forward_pre_hooks
