"""Linear layers that round what goes into a product as well as its weights, by compiled kernels on a CPU.

Where the processor multiplies pairs of bfloat16 (AVX512-BF16, AMX) or fours of bytes (VNNI) at once, such a product
takes half and a quarter of the time of one of floats, and its weights a half and a quarter of the memory. Rows are
rounded one by one: to bfloat16, or to bytes with a scale for each.
"""

from __future__ import annotations

import torch
from torch import nn

from segue.kernels.eight_bits import eight_bits
from segue.kernels.linear import in_panels
from segue.kernels.native import BYTES, WIDE_BYTES, library, product

MOST_INPUTS = 2**16
"""Of a product of bytes: so many fit into a sum of 32 bits."""


@torch.library.custom_op("segue::rounded_product", mutates_args=())
def rounded_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int) -> torch.Tensor:
    """`product` as one operator of compiled code: [rows, in] → [rows, outputs]."""
    return product(x, panels, bias, outputs, kind)


@rounded_product.register_fake
def _shape(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int) -> torch.Tensor:
    return x.new_empty(len(x), outputs)


class RoundedLinear(nn.Module):
    """A product of bytes or of bfloat16, summed in 32 bits. Takes and gives any float type."""

    panels: torch.Tensor
    bias: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: int) -> None:
        """weight [out_features, in_features], an even number of inputs, of `BYTES` a multiple of 4 and at most
        `MOST_INPUTS`; where there are compiled kernels."""
        super().__init__()
        self._hold(words_of(weight.detach(), kind), bias, weight.shape, weight.dtype, kind)

    @classmethod
    def of_bytes(
        cls, whole: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> RoundedLinear:
        """With these very weights, `whole` [out_features, in_features] int8 times `scale` [out_features]; `dtype`: of
        the weights, as models read it. Where `sums_are_exact`."""
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
        """Nothing but the dtype of what the layer gives: models read it."""
        return torch.empty(0, dtype=self.weight_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        rows = x.reshape(-1, self.in_features).float()
        made = rounded_product if torch.compiler.is_compiling() else product
        y = made(rows, self.panels, self.bias, self.out_features, self.kind)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def words_of(weight: torch.Tensor, kind: int) -> torch.Tensor:
    """[out, in] → [out, in / 2] of `ROUNDED`, or of `BYTES` [out, 2 + in / 4]: what sums start with, as activations are
    128 too much; scales; weights. Words of 32 bits, as float32."""
    if kind != BYTES:
        return weight.to(torch.bfloat16).contiguous().view(torch.float32)
    return bytes_as_words(*eight_bits(weight))


def bytes_as_words(whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[out, in] int8 and [out] float32 → [out, 2 + in / 4], as `words_of` gives them of `BYTES`."""
    start = (-128 * whole.sum(1, dtype=torch.int32)).view(torch.float32)
    return torch.cat([start[:, None], scale[:, None], whole.contiguous().view(torch.float32)], dim=1)


def sums_are_exact(whole: torch.Tensor) -> bool:
    """Whether a product of any bytes with `whole` [out, in] int8 can be made here by compiled kernels without a sum
    that is cut off: the processor has VNNI, or no two neighbouring weights need it (`eight_bits`)."""
    compiled = library()
    inputs = whole.shape[1]
    if compiled is None or whole.device.type != "cpu" or inputs % 4 or inputs > MOST_INPUTS:
        return False
    if compiled.number >= WIDE_BYTES:
        return True
    pairs = whole.unflatten(1, (-1, 2)).to(torch.int16)
    return int(pairs.clamp_min(0).sum(-1).max()) <= 128 and int(pairs.clamp_max(0).sum(-1).min()) >= -128
