"""Weights of 4 or 8 bits with a scale and zero per group of inputs, in the words that native/grouped.h reads."""

from __future__ import annotations

import torch

from segue.kernels.cpu.native import EIGHTS, EIGHTS_BY_FLOATS, FOURS, FOURS_BY_FLOATS, gemm, library
from segue.kernels.cpu.panels import in_panels
from segue.kernels.linear.grouped_linear import GroupedWeights

_SCALE = -(2**12)
"""Mask of a scale's float32 bits in a word that it shares with its zero."""
_PARTS = 16
"""A zero in a shared word is a multiple of 1 / 16."""
_FURTHEST = 2**11
"""Range of a zero in a shared word, in sixteenths from the middle: [-2048, 2048)."""


_FAR = 100
"""Largest magnitude of a group's weights in units of its scale: limited by the word of scale and zero."""


def are_words(inputs: int, groups: int, bits: int) -> bool:
    """Whether the numbers of a group fill whole words."""
    return inputs % groups == 0 and inputs // groups % (32 // bits) == 0


def kind_of(scale: torch.Tensor, zero: torch.Tensor, bits: int) -> int:
    """The kind of GEMM for such weights; scale and zero are float32."""
    parts = (zero - _middle(bits)) * _PARTS
    fit = (parts == parts.round()) & (parts >= -_FURTHEST) & (parts < _FURTHEST)
    shared = not bool((scale.view(torch.int32) & ~_SCALE).any()) and bool(fit.all())
    if bits == 4:
        return FOURS if shared else FOURS_BY_FLOATS
    return EIGHTS if shared else EIGHTS_BY_FLOATS


def words_of(weights: GroupedWeights, kind: int, bits: int) -> torch.Tensor:
    """[outputs, words] int32: for each group its scale and zero, then its numbers."""
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


def read_words(words: torch.Tensor, kind: int, bits: int, groups: int) -> GroupedWeights:
    """The inverse of `words_of`."""
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
    return GroupedWeights(numbers ^ _middle(bits), scale, zero)


def fitting(scale: torch.Tensor) -> torch.Tensor:
    """The nearest scales, float32, that can share a word with their zero."""
    return (scale.float().contiguous().view(torch.int32) - _SCALE // 2 & _SCALE).view(torch.float32)


def _middle(bits: int) -> int:
    return 1 << bits - 1


def four_bits_from_zero(weight: torch.Tensor, group: int) -> GroupedWeights:
    """[outputs, inputs] → numbers, scale and zero, where the weight is `(number - zero) * scale`, for groups of `group`
    inputs: the nearest numbers for a scale and a zero that share a word."""
    groups = weight.detach().float().unflatten(1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    furthest = torch.maximum(low.abs(), high.abs())
    scale = fitting(torch.maximum((high - low) / 15, furthest / _FAR).clamp_min_(1e-30))
    zero = (low / scale * -16).round_().div_(16)
    numbers = (groups / scale[..., None]).add_(zero[..., None]).round_().clamp_(0, 15)
    return GroupedWeights(numbers.to(torch.uint8).flatten(1), scale, zero)


def grouped_panels(
    weights: GroupedWeights, bias: torch.Tensor | None, bits: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(the kind of GEMM, panels [panels, words, panel] int32, their bias [panels * panel]) of weights with float32
    scales; bias float32."""
    compiled = library()
    assert compiled is not None
    kind = kind_of(weights.scale, weights.zero, bits)
    panels, on = in_panels(words_of(weights, kind, bits).view(torch.float32), bias, compiled.panel)
    return kind, panels.view(torch.int32), on


def grouped_gemm(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int, group: int
) -> torch.Tensor:
    """[rows, in] → [rows, outputs], with `grouped_panels` of groups of `group` inputs."""
    return gemm(x, panels, bias, outputs, kind, group=group)


@torch.library.custom_op("segue::grouped_gemm", mutates_args=())
def _operator(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int, group: int
) -> torch.Tensor:
    """`grouped_gemm` for compiled code."""
    return gemm(x, panels, bias, outputs, kind, group=group)


@_operator.register_fake
def _shape(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, outputs: int, kind: int, group: int
) -> torch.Tensor:
    return x.new_empty(len(x), outputs)
