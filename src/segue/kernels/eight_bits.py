"""Weights in 8 bits whose products with bytes every processor can sum."""

from __future__ import annotations

import torch

_LARGEST = 127


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] → (whole numbers [outputs, inputs] int8, scale [outputs]).

    A processor without VNNI sums products of two neighbouring inputs in 16 bits: `255 * 128` fits, two times
    `255 * 127` does not. So a scale is no finer than such pairs allow, on any processor: answers are the same on all.
    """
    weight = weight.detach().float()
    pairs = weight.unflatten(1, (-1, 2))
    largest = torch.stack(
        [weight.abs().amax(1), pairs.clamp_min(0).sum(-1).amax(1), pairs.clamp_max(0).sum(-1).neg().amax(1)]
    )
    scale = largest.amax(0).clamp_min_(1e-12) / _LARGEST
    return (weight / scale[:, None]).round_().to(torch.int8), scale
