"""Layers that are divided among the ranks of a group, following Megatron-LM (arXiv 1909.08053, section 3).

A column-parallel layer has a part of the output features and needs no communication; a row-parallel layer has a part of
the input features, and an all-reduce sums its ranks' outputs. Wrappers hold the layer that they run, so that weight
packing (`segue.kernels.prepare`) still finds a plain `nn.Linear`.
"""

from __future__ import annotations

import torch
from torch import nn

from segue.kernels.linear.lora import Share
from segue.parallel.group import Group


class Divided(nn.Module):
    """Base of linear layers of which this rank has a share."""

    def __init__(self, linear: nn.Linear, share: Share | None) -> None:
        """`share`: for LoRA adapters; None if there are none."""
        super().__init__()
        self.linear = linear
        self.share = share

    @property
    def weight(self) -> torch.Tensor:
        """This rank's part."""
        return self.linear.weight


class ColumnParallel(Divided):
    """A linear layer with this rank's output features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in features] → [..., this rank's out features]."""
        return self.linear(x)


class RowParallel(Divided):
    """A linear layer with this rank's input features: outputs are summed, and the bias is added once."""

    def __init__(
        self,
        linear: nn.Linear,
        bias: nn.Parameter | None,
        group: Group,
        *,
        split: bool,
        share: Share | None = None,
    ) -> None:
        """`linear` has no bias. `split`: the input is whole, and this rank takes its part of it."""
        super().__init__(linear, share)
        self.bias = bias
        self._group = group
        self._split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's or all input features] → [..., out features], whole."""
        if self._split:
            width = x.shape[-1] // self._group.size
            x = x.narrow(-1, self._group.rank * width, width)
        product = self._group.all_reduce(self.linear(x).contiguous())
        return product if self.bias is None else product + self.bias


class SummedRMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over features that are divided among the ranks."""

    def __init__(self, weight: torch.Tensor | None, width: int, eps: float, group: Group) -> None:
        """`weight`: this rank's part; `width`: features of all ranks."""
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._width = width
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's features] → the same, in the dtype of `x`; sums are float32."""
        whole = x.float()
        squares = self._group.all_reduce(whole.square().sum(-1, keepdim=True))
        normalised = whole * torch.rsqrt(squares / self._width + self.eps)
        return (normalised if self.weight is None else normalised * self.weight).to(x.dtype)


class Gathered(Divided):
    """A linear layer with this rank's output features (the last rank's are padded), all-gathered to the whole."""

    def __init__(self, linear: nn.Linear, share: Share, group: Group) -> None:
        super().__init__(linear, share)
        self.out_features = share.out_features
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in features] → [..., out features]."""
        part = self.linear(x)
        parts = self._group.all_gather(part.reshape(1, -1, part.shape[-1]))  # [ranks, rows, part]
        whole = parts.transpose(0, 1).reshape(*part.shape[:-1], -1)
        return whole[..., : self.out_features]


class SharedEmbedding(nn.Module):
    """An embedding with this rank's rows of the table; the rank that has a row sends it to all."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        """`embedding`: the library's own, which may scale its output, with this rank's rows."""
        super().__init__()
        self.embedding = embedding
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows."""
        return self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] ids → [..., hidden]."""
        rows = self.embedding.weight.shape[0]
        place = input_ids - self._group.rank * rows
        mine = (place >= 0) & (place < rows)
        looked_up = self.embedding(place.clamp(0, rows - 1))
        return self._group.all_reduce(looked_up.masked_fill(~mine[..., None], 0).contiguous())
