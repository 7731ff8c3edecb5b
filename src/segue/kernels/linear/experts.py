"""Mixtures of experts on a CPU: one GEMM per expert over its rows, with packed weights.

An experts function of `transformers` (`ExpertsInterface`). With compiled kernels, all experts of a layer are one call
(`segue.kernels.cpu.experts`): it reads the routing itself, so that a decode step with experts can be replayed. On GPUs,
and in dtypes for which a layout gains nothing, the library's own `grouped_mm` is used, which the library selects if
torch has the kernel.

Milliseconds per layer, two cores, float32, tokens routed evenly, weights laid out for oneDNN:

| hidden, inner, experts, experts per token | tokens | library's loop | `batched_mm` | `grouped_mm` | this |
|---|---|---|---|---|---|
| 1024, 384, 32, 4 | 1 | 2.4 | 5.0 | 2.0 | 1.2 |
| | 8 | 11.9 | 76 | 10.6 | 6.0 |
| | 256 | 32 | | 29 | 22 |
| 512, 256, 64, 8 | 1 | 2.1 | 4.0 | 1.9 | 1.2 |
| | 8 | 11.8 | 52 | 8.5 | 5.3 |
| | 256 | 26 | | 22 | 17 |
| 1024, 1792, 8, 2 | 1 | 3.1 | 10 | 3.1 | 2.1 |
| | 8 | 21 | 196 | 18 | 6.8 |
| | 256 | 75 | | 68 | 36 |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.linear import laid_out, packed_gemm

PACKED_EXPERTS = "segue_packed"
"""The experts implementation that a decoder is set to when its experts are packed."""


class _Packed(nn.Module):
    """One packed linear layer per expert, in the order of the experts."""

    def __init__(self, weights: torch.Tensor, biases: torch.Tensor | None, rows: int) -> None:
        """weights [experts, out, in], biases [experts, out]."""
        super().__init__()
        self.out_features = weights.shape[1]
        layers = [
            laid_out(weight.detach().contiguous(), None if biases is None else biases[number].detach(), rows)
            for number, weight in enumerate(weights)
        ]
        self.together = not layers[0][0].is_mkldnn and len({weight.shape for weight, _ in layers}) == 1
        """The layers are in panels of one shape, and held as `weight` and `bias` [experts, ...]."""
        if self.together:
            self.register_buffer("weight", torch.stack([weight for weight, _ in layers]), persistent=False)
            self.register_buffer(
                "bias", torch.stack([bias for _, bias in layers if bias is not None]), persistent=False
            )
            return
        for number, (weight, bias) in enumerate(layers):
            self.register_buffer(f"weight{number}", weight, persistent=False)
            self.register_buffer(f"bias{number}", bias, persistent=False)

    def of(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out]."""
        if self.together:
            weight, bias = self.all()
            return packed_gemm(x, weight[expert], bias[expert], self.out_features)
        weight = self.get_buffer(f"weight{expert}")
        return packed_gemm(x, weight, self._buffers[f"bias{expert}"], self.out_features)

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of all experts that are held `together`."""
        return self.get_buffer("weight"), self.get_buffer("bias")


def pack_experts(root: nn.Module, rows: int) -> int:
    """Replace the weights of all experts under `root` by packed ones; `rows`: the usual number of rows per GEMM.
    Returns the number of modules: 0, without any change, unless all of them can be packed."""
    found: list[Any] = [module for module in root.modules() if _is_experts(module)]
    if not all(_can_pack(module) for module in found):
        return 0
    for module in found:
        both, down = (_pack(module, name, rows) for name in ("gate_up_proj", "down_proj"))
        module.in_one_call = both.together and down.together and _is_swiglu(module, both.out_features)
    return len(found)


def _pack(module: Any, name: str, rows: int) -> _Packed:
    """Replace one weight, and its bias, of all experts of a module."""
    weights, biases = module.get_parameter(name), module._parameters.get(f"{name}_bias")
    packed = _Packed(weights.transpose(1, 2) if module.is_transposed else weights, biases, rows)
    delattr(module, name)
    module.register_parameter(f"{name}_bias", None)
    module.register_module(name, packed)
    return packed


@torch.no_grad()
def _is_swiglu(module: Any, width: int) -> bool:
    """Whether an expert gives `down(silu(gate) * up)`, with gate before up and without a norm."""
    if module._modules.get("post_expert_norm") is not None:
        return False
    x = torch.linspace(-8.0, 8.0, 3 * width).view(width, 3).t()
    gate, up = x.chunk(2, dim=-1)
    theirs = module._apply_gate(x)
    return bool(theirs.shape == gate.shape) and torch.allclose(theirs, functional.silu(gate) * up, atol=1e-5)


def _is_experts(module: nn.Module) -> bool:
    """Whether the library's decorator marked the module as experts; there is no common base class."""
    return "is_transposed" in vars(module) and "has_gate" in vars(module)


def _can_pack(module: nn.Module) -> bool:
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return (
        bool(module.has_gate)
        and torch.backends.mkldnn.is_available()
        and all(
            weight is not None and weight.ndim == 3 and weight.device.type == "cpu" and weight.dtype == torch.float32
            for weight in weights
        )
    )


@torch.compiler.disable  # the number of rows per expert depends on the tokens
def packed_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that `transformers` calls, with its argument names: [tokens, hidden], [tokens, k] expert indices and
    their weights → [tokens, hidden]. `self`: the library's module with packed weights."""
    compiled = cpu_kernels()
    if compiled is not None and self.in_one_call and hidden_states.dtype == torch.float32:
        both, down = self.gate_up_proj.all(), self.down_proj.all()
        inner = self.gate_up_proj.out_features // 2
        return compiled.mixed_experts(hidden_states, top_k_index, top_k_weights, both, down, inner)
    tokens, k = top_k_index.shape
    experts = top_k_index.reshape(-1)
    order = experts.argsort(stable=True)
    rows = hidden_states[order // k]
    mixed = torch.empty_like(rows)
    begin = 0
    for expert, count in enumerate(torch.bincount(experts).tolist()):
        if count:
            end = begin + count
            inner = self._apply_gate(self.gate_up_proj.of(expert, rows[begin:end]))
            mixed[begin:end] = self.down_proj.of(expert, inner)
            begin = end
    norm = self._modules.get("post_expert_norm")  # transformers 5.17 has no flag for it
    if norm is not None:
        mixed = norm(mixed)
    mixed *= top_k_weights.reshape(-1)[order, None]
    sorted_back = torch.empty_like(mixed)
    sorted_back[order] = mixed
    return sorted_back.view(tokens, k, -1).sum(dim=1)


ExpertsInterface.register(PACKED_EXPERTS, packed_experts)
