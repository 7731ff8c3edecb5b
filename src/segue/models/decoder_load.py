"""What is done with a decoder while it is loaded: its weights in fewer bits, and a short text to compare it by."""

from __future__ import annotations

import torch
from torch import nn

from segue.kernels.quantized import quantize_linears
from segue.messages.errors import ConfigError
from segue.models.library import Conv1D
from segue.models.tolerance import difference, tolerance

_PROBE = 24
"""Tokens of the short text."""
_COARSE_TOLERANCE = 0.3
COARSE = ("bfloat16", "int8", "int4")
"""Quantisations that round what goes into a layer, too; `int4` where there are no compiled kernels."""


def probe_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """[tokens] ids of a short text."""
    return (torch.arange(_PROBE, device=device) * 7919 + 1) % vocab_size


def check_same(kind: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, *, coarse: bool) -> None:
    """Logits [tokens, vocab] of a short text, computed in `dtype`; `coarse`: with activations rounded. Raises
    `ConfigError`."""
    off, most = difference(ours, theirs), _COARSE_TOLERANCE if coarse else tolerance(dtype)
    if not off <= most:
        raise ConfigError(
            f"{kind} cannot be served: its logits from token ids differ from those from embeddings by "
            f"{off:.1e} (at most {most:.0e}); it does more with the ids than to embed them once",
            field="architectures",
        )


def quantize(kind: str, decoder: nn.Module, quantization: str) -> None:
    """The linear layers of a decoder, as a deployment says. Raises `ConfigError` where there are none."""
    if quantization != "none" and not quantize_linears(decoder, quantization, _plain_linear):
        raise ConfigError(
            f"quantization is {quantization!r}, but {kind} has no linear layer that can be made into that",
            field="quantization",
        )


def _plain_linear(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight [outputs, inputs] and bias of a linear layer that is nothing more."""
    if type(module) is nn.Linear and "forward" not in vars(module):
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.get_parameter("weight").T.contiguous(), module.get_parameter("bias")
    return None
