"""Packs weights with auto-round, a program of its own (it changes transformers when it is imported):
`auto_round_packing.py KIND BITS GROUP_SIZE WEIGHTS RESULT`. WEIGHTS has `NAME.weight`, `NAME.scale` and `NAME.zero` of
layers; RESULT gets the tensors that auto-round stores, and `NAME.meant`: what its own layer computes with them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from segue.kernels.torchvision_shim import ensure_torchvision


def packed_layer(kind: str, bits: int, size: int, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Any:
    """auto-round's layer of a weight [outputs, inputs], scales and zeros [outputs, groups]."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    if kind == "awq":
        from auto_round.export.export_to_awq.utils import WQLinear_GEMM

        return WQLinear_GEMM.from_linear(linear, bits, size, scales=scale.T, zeros=zero.T, device="cpu")
    if kind == "gptq":
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch import QuantLinear
    layer = QuantLinear(bits, size, weight.shape[1], weight.shape[0], bias=False)
    layer.device = "cpu"  # the one of the second version reads it, and nobody sets it
    layer.pack(linear, scale, zero, device="cpu")
    return layer


def main(kind: str, bits: int, size: int, weights: str, result: str) -> None:
    ensure_torchvision()  # auto-round imports transformers
    given = load_file(weights)
    made: dict[str, torch.Tensor] = {}
    for name in sorted({key.rpartition(".")[0] for key in given}):
        layer = packed_layer(kind, bits, size, *(given[f"{name}.{part}"] for part in ("weight", "scale", "zero")))
        made |= {f"{name}.{leaf}": tensor.contiguous() for leaf, tensor in layer.state_dict().items()}
        inputs = given[f"{name}.weight"].shape[1]
        made[f"{name}.meant"] = layer(torch.eye(inputs, dtype=torch.float16)).float().T.contiguous()
    save_file(made, result)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
