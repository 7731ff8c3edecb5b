"""The packed weights of one layer, independent of the format, and the layer that computes with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from segue.kernels.linear.layers import QuantizedLinear
from segue.kernels.linear.stored import layer_of_codes, layer_of_groups, layer_of_scales

Tensors = Mapping[str, torch.Tensor]
"""The tensors of one layer, by the last part of their names."""


class Unreadable(Exception):
    """A layer's tensor does not match its format."""

    def __init__(self, leaf: str, why: str) -> None:
        """`leaf`: the last part of its name; `why`: continues the sentence after the full name."""
        super().__init__(why)
        self.leaf = leaf
        self.why = why


class Weights(Protocol):
    """The weights of one linear layer."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weights, [out_features, in_features]."""

    def layer(self, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The layer that computes with them; `dtype`: the weights' dtype as models see it."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """`(number - zero) * scale`, with scale and zero per group of inputs."""

    numbers: torch.Tensor
    """[outputs, inputs] uint8"""
    scale: torch.Tensor
    """[outputs, groups] float"""
    zero: torch.Tensor
    """[outputs, groups]"""
    bits: int
    """Numbers are below 2**bits; at most 8."""
    group: torch.Tensor
    """[inputs] int64: the group of each input."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        scale, zero = (part.float().index_select(1, self.group) for part in (self.scale, self.zero))
        return (self.numbers.float() - zero).mul_(scale).to(dtype)

    def layer(self, bias: torch.Tensor | None, dtype: torch.dtype) -> QuantizedLinear:
        """The served layer. Groups of different sizes are divided into equal ones."""
        inputs = self.numbers.shape[1]
        counts = torch.bincount(self.group, minlength=self.scale.shape[1])
        unit = math.gcd(*counts.tolist())
        order = torch.argsort(self.group, stable=True)
        numbers, scale, zero = self.numbers, self.scale, self.zero.to(self.scale.dtype)
        if len(counts) * unit != inputs:
            scale, zero = (part.repeat_interleave(counts // unit, dim=1) for part in (scale, zero))
        sorted_already = torch.equal(order, torch.arange(inputs, device=order.device))
        return layer_of_groups(
            numbers if sorted_already else numbers[:, order],
            *(scale.contiguous(), zero.contiguous(), bias),
            bits=4 if self.bits <= 4 and inputs % 2 == 0 else 8,
            dtype=dtype,
            order=None if sorted_already else order,
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """Int8 or float8 numbers times a scale per block."""

    held: torch.Tensor
    """[outputs, inputs] int8 or float8."""
    scale: torch.Tensor
    """[rows, columns] float: one per block."""
    block: tuple[int, int]
    """(outputs, inputs)"""
    rounded: bool
    """Activations are rounded to int8 as well, with a scale per token, which allows int8 matmuls on a CPU. Elsewhere
    they are not rounded."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.held.shape[0], self.held.shape[1]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return layer_of_scales(self.held, self.scale, None, block=self.block, dtype=dtype, rounded=False).weight

    def layer(self, bias: torch.Tensor | None, dtype: torch.dtype) -> QuantizedLinear:
        return layer_of_scales(self.held, self.scale, bias, block=self.block, dtype=dtype, rounded=self.rounded)


@dataclass(frozen=True, slots=True)
class Coded:
    """4-bit indices into a table of values, times a scale per block of all weights."""

    held: torch.Tensor
    """[blocks, size / 2] uint8, two to a byte, the first in the upper half."""
    table: torch.Tensor
    """[16] float"""
    scale: torch.Tensor
    """[blocks] float"""
    shape: tuple[int, int]
    """(out_features, in_features)"""

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return self.layer(None, dtype).weight

    def layer(self, bias: torch.Tensor | None, dtype: torch.dtype) -> QuantizedLinear:
        return layer_of_codes(self.held, self.table, self.scale, bias, shape=self.shape, dtype=dtype)


def same(*names: str) -> dict[str, str]:
    """A mapping for tensors whose reader names equal their names in files."""
    return {name: name for name in names}


def taken(tensors: Tensors, leaf: str, dtypes: Callable[[torch.dtype], bool], what: str, dims: int) -> torch.Tensor:
    """One of the tensors. Raises `Unreadable` unless it exists and has a valid dtype (`what`) and `dims` dimensions."""
    if leaf not in tensors:
        raise Unreadable(leaf, "is not in the checkpoint")
    tensor = tensors[leaf]
    if not dtypes(tensor.dtype) or tensor.ndim != dims:
        raise Unreadable(
            leaf, f"is {_named(tensor.dtype)} {list(tensor.shape)}; it must be {what} of {dims} dimensions"
        )
    return tensor


def words_of(tensors: Tensors, leaf: str) -> torch.Tensor:
    """32-bit words with packed numbers, [rows, columns]. Raises `Unreadable`."""
    return taken(tensors, leaf, lambda dtype: dtype == torch.int32, "int32", 2)


def floats_of(tensors: Tensors, leaf: str, dims: int = 2) -> torch.Tensor:
    """A floating-point tensor. Raises `Unreadable`."""
    return taken(tensors, leaf, lambda dtype: dtype.is_floating_point and dtype.itemsize > 1, "a float", dims)


def groups_of(tensors: Tensors, leaf: str, inputs: int, groups: int) -> torch.Tensor:
    """[inputs] int64: the group of each input. Raises `Unreadable`."""
    group = taken(tensors, leaf, lambda dtype: not dtype.is_floating_point, "integers", 1).long()
    if len(group) != inputs:
        raise Unreadable(leaf, f"has {len(group)} inputs; the weights have {inputs}")
    if inputs and not (int(group.min()) >= 0 and int(group.max()) < groups):
        raise Unreadable(leaf, f"names groups from {int(group.min())} to {int(group.max())}; there are {groups}")
    return group


def in_order(inputs: int, size: int, device: torch.device) -> torch.Tensor:
    """[inputs] int64: consecutive groups of `size` inputs."""
    return torch.arange(inputs, device=device) // size


def must_be(leaf: str, tensor: torch.Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raise `Unreadable` unless a tensor has this shape."""
    if tuple(tensor.shape) != shape:
        raise Unreadable(leaf, f"is {list(tensor.shape)}; {why} it must be {list(shape)}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
