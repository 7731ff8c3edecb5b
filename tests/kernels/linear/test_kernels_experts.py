"""Packed experts against the library's own loop over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from segue.kernels.cpu.experts import mixed_experts
from segue.kernels.cpu.native import Library, libraries
from segue.kernels.cpu.panels import in_panels
from segue.kernels.cpu.recorder import record
from segue.kernels.linear.experts import PACKED_EXPERTS, pack_experts

SHAPE: dict[str, Any] = {"hidden_size": 32, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralExperts, MixtralConfig(**SHAPE, intermediate_size=48, num_local_experts=5)),
    "qwen3-moe": (Qwen3MoeExperts, Qwen3MoeConfig(**SHAPE, moe_intermediate_size=48, num_experts=5)),
    # biases, and weights that lie the other way round
    "gpt-oss": (GptOssExperts, GptOssConfig(**SHAPE, intermediate_size=48, num_local_experts=5)),
}


def made(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    build, config = KINDS[kind]
    torch.manual_seed(0)
    experts = build(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    return nn.Sequential(experts.to(dtype).requires_grad_(False)), config


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_library(kind: str, tokens: int) -> None:
    net, config = made(kind)
    hidden = torch.randn(tokens, 32)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)
    config._experts_implementation = "eager"
    expected = net[0](hidden, chosen, weights)
    before = sum(tensor.nbytes for tensor in net.parameters())
    assert pack_experts(net, 8) == 1
    config._experts_implementation = PACKED_EXPERTS
    torch.testing.assert_close(net[0](hidden, chosen, weights), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(net[0](hidden, chosen.flip(0) if tokens > 1 else (chosen + 1) % 5, weights), expected)
    assert not list(net.parameters())
    held = sum(tensor.nbytes for tensor in net.buffers())
    assert before <= held < 1.5 * before, "they are there twice"  # a layout may pad the last outputs


@torch.inference_mode()
@pytest.mark.parametrize("compiled", libraries(), ids=lambda compiled: f"set {compiled.number}")
@pytest.mark.parametrize("halves", [False, True])
def test_all_in_one_call_equals_one_by_one(compiled: Library, halves: bool) -> None:
    """With every instruction set, and where a token of a replay goes to other experts than in the recorded call."""
    generator = torch.Generator().manual_seed(compiled.number)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) / 4
        return values.bfloat16().float() if halves else values

    experts, hidden, inner = 7, 64, 96
    gates, downs = drawn(experts, 2 * inner, hidden), drawn(experts, hidden, inner)
    words = [
        [weight.bfloat16().contiguous().view(torch.float32) if halves else weight for weight in weights]
        for weights in (gates, downs)
    ]
    both, down = (
        tuple(map(torch.stack, zip(*(in_panels(one, None, compiled.panel) for one in own), strict=True)))
        for own in words
    )
    x, chosen, shares = drawn(5, hidden), torch.empty(5, 3, dtype=torch.long), torch.empty(5, 3)

    def route() -> None:
        x.copy_(torch.randn(5, hidden, generator=generator))
        chosen.copy_(torch.stack([torch.randperm(experts, generator=generator)[:3] for _ in range(5)]))
        shares.copy_(torch.rand(5, 3, generator=generator))

    def mixed() -> torch.Tensor:
        return mixed_experts(x, chosen, shares, both, down, inner, compiled)

    route()
    replay, _ = record(compiled, mixed)
    for _ in range(3):
        route()
        replay()
        gate, up = torch.einsum("ti,tkoi->tko", x, gates[chosen]).chunk(2, dim=-1)
        expected = torch.einsum("tki,tkoi,tk->to", nn.functional.silu(gate) * up, downs[chosen], shares)
        torch.testing.assert_close(replay.result, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(replay.result, mixed())
        alone = [
            mixed_experts(x[i : i + 1], chosen[i : i + 1], shares[i : i + 1], both, down, inner, compiled)
            for i in range(5)
        ]
        assert torch.equal(torch.cat(alone), replay.result)


def test_other_types_and_other_modules_stay() -> None:
    net, _ = made("mixtral", torch.bfloat16)
    assert pack_experts(net, 8) == 0
    assert {name for name, _ in net.named_parameters()} == {"0.gate_up_proj", "0.down_proj"}
    assert pack_experts(nn.Sequential(nn.Linear(4, 4)), 8) == 0
