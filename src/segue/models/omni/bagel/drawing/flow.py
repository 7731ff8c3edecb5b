"""The steps from noise to latents, and guidance by two further contexts. Plain functions on tensors.

n tokens of latents, P numbers in a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segue.models.omni.bagel.drawing.settings import Guidance

_TINY = 1e-8


def levels(count: int, shift: float = 3.0) -> Tensor:
    """[count] noise levels from 1 to 0; `shift` > 1 spends more of them on high noise. The model is called at all but
    the last: count - 1 times."""
    even = torch.linspace(1, 0, count)
    return shift * even / (1 + (shift - 1) * even)


def guided(velocity: Tensor, without_text: Tensor, without_image: Tensor | None, guidance: Guidance) -> Tensor:
    """The guided velocity [n, P] of one request. `without_image`: None if `guidance.image` is 1 or less."""
    pushed = without_text + guidance.text * (velocity - without_text)
    if guidance.renorm == "text_channel":
        pushed = _renormed(pushed, velocity, guidance)
    if without_image is not None:
        pushed = without_image + guidance.image * (pushed - without_image)
    return pushed if guidance.renorm == "text_channel" else _renormed(pushed, velocity, guidance)


def _renormed(pushed: Tensor, velocity: Tensor, guidance: Guidance) -> Tensor:
    over = None if guidance.renorm == "global" else -1
    norms = [torch.linalg.vector_norm(of, dim=over, keepdim=True) for of in (velocity, pushed)]
    return pushed * (norms[0] / (norms[1] + _TINY)).clamp(min=guidance.least, max=1.0)
