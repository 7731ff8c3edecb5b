"""Linear layers that round activations as well as weights, to int8 or bfloat16, with compiled kernels on a CPU.

If the processor multiplies pairs of bfloat16 (AVX512-BF16, AMX) or groups of four int8 (VNNI) at once, such a GEMM
takes half or a quarter of the time of one in float32, and its weights a half or a quarter of the memory. Rows are
rounded one by one: to bfloat16, or to int8 with a scale for each."""

from __future__ import annotations

import torch
from torch import nn

from segue.kernels.cpu.native import BYTES, ROUNDED, WIDE_BYTES, gemm, library
from segue.kernels.cpu.panels import in_panels
from segue.kernels.linear.layers import QuantizedLinear
from segue.kernels.linear.quantized import eight_bits

MOST_INPUTS = 2**16
"""Most inputs of an int8 GEMM whose sums fit into 32 bits."""


@torch.library.custom_op("segue::rounded_gemm", mutates_args=())
def rounded_gemm(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int) -> torch.Tensor:
    """`gemm` as a custom operator for compiled code: [rows, in] → [rows, outputs]."""
    return gemm(x, panels, bias, outputs, kind)


@rounded_gemm.register_fake
def _shape(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int) -> torch.Tensor:
    return x.new_empty(len(x), outputs)


class RoundedLinear(QuantizedLinear):
    """A GEMM of int8 or bfloat16, summed in 32 bits. Takes and returns any float dtype."""

    rounds = True

    panels: torch.Tensor
    bias: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: int) -> None:
        """weight [out_features, in_features], with an even number of inputs, for `BYTES` a multiple of 4 and at most
        `MOST_INPUTS`; needs compiled kernels."""
        super().__init__()
        self._hold(words_of(weight.detach(), kind), bias, weight.shape, weight.dtype, kind)

    @classmethod
    def of_bytes(
        cls, whole: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> RoundedLinear:
        """Use exactly the weights `whole` [out_features, in_features] int8 times `scale` [out_features]; `dtype`: of
        the weights, as models read it. Requires `sums_are_exact`."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._hold(bytes_as_words(whole, scale.float()), bias, whole.shape, dtype, BYTES)
        return made

    def _hold(
        self, words: torch.Tensor, bias: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, kind: int
    ) -> None:
        compiled = library()
        assert compiled is not None
        self.out_features, self.in_features = shape
        self.weight_dtype = dtype
        self.kind = kind
        on = None if bias is None else bias.detach().float()
        panels, padded = in_panels(words, on, compiled.panel)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("bias", padded, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor with the dtype of the layer's output, which models read."""
        return torch.empty(0, dtype=self.weight_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        rows = x.reshape(-1, self.in_features).float()
        made = rounded_gemm if torch.compiler.is_compiling() else gemm
        y = made(rows, self.panels, self.bias, self.out_features, self.kind)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def words_of(weight: torch.Tensor, kind: int) -> torch.Tensor:
    """[out, in] → [out, in / 2] for `ROUNDED`; for `BYTES` [out, 2 + in / 4]: the sums' start values (they correct
    activations, which are offset by 128), scales, weights. 32-bit words, as float32."""
    if kind != BYTES:
        return weight.to(torch.bfloat16).contiguous().view(torch.float32)
    return bytes_as_words(*eight_bits(weight))


def bytes_as_words(whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[out, in] int8 and [out] float32 → [out, 2 + in / 4], as in `words_of` for `BYTES`."""
    start = (-128 * whole.sum(1, dtype=torch.int32)).view(torch.float32)
    return torch.cat([start[:, None], scale[:, None], whole.contiguous().view(torch.float32)], dim=1)


def of_scales(
    held: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> RoundedLinear | None:
    """The layer with exactly the weights `held` [out, in] int8 times `scale` [out]; None if it cannot sum exactly."""
    return RoundedLinear.of_bytes(held, scale, bias, dtype) if sums_are_exact(held) else None


def sums_are_exact(whole: torch.Tensor) -> bool:
    """Whether compiled kernels here can multiply any int8 values with `whole` [out, in] int8 without saturating a sum:
    the processor has VNNI, or no two neighbouring weights need it (`eight_bits`)."""
    compiled = library()
    inputs = whole.shape[1]
    if compiled is None or whole.device.type != "cpu" or inputs % 4 or inputs > MOST_INPUTS:
        return False
    if compiled.number >= WIDE_BYTES:
        return True
    pairs = whole.unflatten(1, (-1, 2)).to(torch.int16)
    return int(pairs.clamp_min(0).sum(-1).max()) <= 128 and int(pairs.clamp_max(0).sum(-1).min()) >= -128


def rounded(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> RoundedLinear | None:
    """The layer for quantising a weight [out, in] to `bfloat16` or `int8`; None if it has too many inputs."""
    if weight.shape[1] > MOST_INPUTS:
        return None
    return RoundedLinear(weight, bias, ROUNDED if kind == "bfloat16" else BYTES)
