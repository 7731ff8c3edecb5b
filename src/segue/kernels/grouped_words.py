"""Weights of 4 or 8 bits with a scale and a zero per group of inputs, as the words of 32 bits that native/grouped.h
reads.

Where a scale has no more than 12 significant bits (float16 has 11, bfloat16 8) and a zero is in sixteenths, one word
has both; else there are two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from segue.kernels.native import EIGHTS, EIGHTS_BY_FLOATS, FOURS, FOURS_BY_FLOATS

_SCALE = -(2**12)
"""The bits of a float that a scale has in a word that it shares."""
_PARTS = 16
"""Of a number, that a zero is in then."""
_FURTHEST = 2**11
"""Parts that a zero is below or, less one, above the middle then."""


class Grouped(NamedTuple):
    """Weights, `(number - zero) * scale`."""

    numbers: torch.Tensor
    """[outputs, inputs] uint8"""
    scale: torch.Tensor
    """[outputs, groups] float32"""
    zero: torch.Tensor
    """[outputs, groups] float32"""

    @property
    def wide(self) -> torch.Tensor:
        """[outputs, inputs] float32"""
        groups = self.numbers.unflatten(1, (self.scale.shape[1], -1)).float()
        return groups.sub_(self.zero[..., None]).mul_(self.scale[..., None]).flatten(1)


def are_words(inputs: int, groups: int, bits: int) -> bool:
    """Whether the numbers of a group fill words."""
    return inputs % groups == 0 and inputs // groups % (32 // bits) == 0


def kind_of(scale: torch.Tensor, zero: torch.Tensor, bits: int) -> int:
    """Which kind of product takes such weights; scale and zero are float32."""
    parts = (zero - _middle(bits)) * _PARTS
    fit = (parts == parts.round()) & (parts >= -_FURTHEST) & (parts < _FURTHEST)
    shared = not bool((scale.view(torch.int32) & ~_SCALE).any()) and bool(fit.all())
    if bits == 4:
        return FOURS if shared else FOURS_BY_FLOATS
    return EIGHTS if shared else EIGHTS_BY_FLOATS


def words_of(weights: Grouped, kind: int, bits: int) -> torch.Tensor:
    """[outputs, words] int32: of each group its scale, then its numbers."""
    numbers, scale, zero = weights
    centred = numbers ^ _middle(bits)
    held = centred[:, 0::2] | centred[:, 1::2] << 4 if bits == 4 else centred
    of_groups = held.contiguous().view(torch.int32).unflatten(1, (scale.shape[1], -1))
    if kind in (FOURS, EIGHTS):
        parts = ((zero - _middle(bits)) * _PARTS).int()
        scales = (scale.view(torch.int32) | parts & ~_SCALE)[..., None]
    else:
        scales = torch.stack([scale, zero], dim=-1).view(torch.int32)
    return torch.cat([scales, of_groups], dim=-1).flatten(1)


def read_words(words: torch.Tensor, kind: int, bits: int, groups: int) -> Grouped:
    """What `words_of` was given."""
    of_groups = words.unflatten(1, (groups, -1))
    if kind in (FOURS, EIGHTS):
        shared = of_groups[..., 0]
        scale = (shared & _SCALE).view(torch.float32)
        zero = (shared << 20 >> 20).float() / _PARTS + _middle(bits)
        held = of_groups[..., 1:]
    else:
        scale, zero = (of_groups[..., place].contiguous().view(torch.float32) for place in (0, 1))
        held = of_groups[..., 2:]
    numbers = held.flatten(1).contiguous().view(torch.uint8)
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)
    return Grouped(numbers ^ _middle(bits), scale, zero)


def fitting(scale: torch.Tensor) -> torch.Tensor:
    """The nearest scales, float32, that share a word with their zero."""
    return (scale.float().contiguous().view(torch.int32) - _SCALE // 2 & _SCALE).view(torch.float32)


def _middle(bits: int) -> int:
    return 1 << bits - 1
