"""Steps of equal length in all directions of a matrix (Muon: Jordan et al. 2024).

A layer whose inputs have a mean, as those after snakes, gets gradients of which one direction is far larger than the
others; Adam's steps along it add up until the sound explodes, at rates at which nothing else has begun to learn. Here a
step is the nearest orthogonal matrix of the gradient's running mean. The rows of a convolution's matrix are its first
dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_DECAY = 0.1
"""Of the weights, at a rate of 1."""
_NEWTON = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, which brings singular values from 0.01 on near 1."""


class Muon(torch.optim.Optimizer):
    """Of weights with two or more dimensions. Groups with `stacked` have one matrix for each entry of the first.
    `half`: products in bfloat16, as published."""

    def __init__(self, parameters: Iterable[Any], lr: float, *, half: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "stacked": False})
        self._dtype = torch.bfloat16 if half else torch.float32

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(weight)
                mean = state["mean"].mul_(_MOMENTUM).add_(weight.grad)
                matrix = (weight.grad + _MOMENTUM * mean).flatten(2 if group["stacked"] else 1)
                size = max(1.0, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
                weight.mul_(1 - group["lr"] * _DECAY)
                weight.add_(orthogonal(matrix.to(self._dtype)).view_as(weight), alpha=-group["lr"] * size)


def inside(*layers: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Which weights of layers to train like this: matrices, and those of experts, stacked. Not routers: a row of theirs
    is an expert's own."""
    named = [one for layer in layers for one in layer.named_parameters()]
    matrices = [one for name, one in named if one.ndim == 2 and not name.endswith(".gate.weight")]
    return matrices, [one for name, one in named if one.ndim == 3 and ".experts." in name]


def orthogonal(matrix: Tensor) -> Tensor:
    """Of [..., rows, columns], nearly the orthogonal matrices that are nearest to them."""
    first, second, third = _NEWTON
    high = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if high else matrix
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = wide @ wide.mT
        wide = first * wide + (second * square + third * square @ square) @ wide
    return wide.mT if high else wide
