"""Finds in a picture's pixels what is there, by plain checks."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from demo_model.data.captions import Caption, Edit, caption_of, shows
from demo_model.data.scenes import COLOURS, RADII, SHAPES, SIDE, Thing, covered, outline

STEPS = 8
"""Of the denoiser, with which pictures are drawn."""
_CHROMA = 84
_SPECK = 24
"""Pixels; smaller spots of colour are no things."""
_VIEW = 44
"""Pixels around a spot that are compared with shapes."""
_ALIKE = 0.6
"""Intersection over union of a spot and the shape that it is taken for."""


def found_in(picture: np.ndarray) -> list[Thing] | None:
    """The things in a picture, uint8 [SIDE, SIDE, 3], by plain checks: spots of one colour, compared with each shape.
    None where a spot looks like none of them."""
    pixels = _blurred(torch.tensor(picture).permute(2, 0, 1).float())
    palette = torch.tensor(list(COLOURS.values())).float()
    chroma = pixels.amax(0) - pixels.amin(0)
    nearest = (_hue(pixels)[:, None] - _hue(palette.T)[:, :, None, None]).square().sum(0).argmin(0)
    things = []
    for spot in _spots(torch.where(chroma > _CHROMA, nearest, -1)):
        if spot.sum() < _SPECK:
            continue
        thing = _likest(pixels, spot, list(COLOURS)[int(nearest[spot].mode().values)])
        if thing is None:
            return None
        things.append(thing)
    return things


def ground_of(picture: np.ndarray) -> str | None:
    """Whether a picture's background, at its border, is dark or pale throughout."""
    border = np.concatenate([picture[:3].reshape(-1, 3), picture[-3:].reshape(-1, 3)]).mean(1)
    low, high = np.percentile(border, (10, 90))
    return "dark" if high < 100 else "pale" if low > 150 else None


def is_right(what: Caption | Edit, pixels: np.ndarray) -> bool:
    """Whether a picture, uint8 [SIDE, SIDE, 3], shows what a caption says, or what an edit leaves."""
    things = found_in(pixels)
    return things is not None and shows(what, things) and what.ground in (None, ground_of(pixels))


def follows(example: dict[str, Any], pixels: np.ndarray) -> bool:
    """Whether a picture shows what one of `examples.json` asks for."""
    return is_right(caption_of(example.get("answer", example["prompt"])), pixels)


def _hue(colours: Tensor) -> Tensor:
    """[3, ...]: what is left of colours without grey and brightness."""
    plain = colours - colours.amin(0)
    return plain / plain.amax(0).clamp(min=1)


def _spots(classes: Tensor) -> list[Tensor]:
    """bool [SIDE, SIDE] of each connected area of one class that is not negative."""
    rows = classes.tolist()
    left = {(y, x): one for y, row in enumerate(rows) for x, one in enumerate(row) if one >= 0}
    found = []
    while left:
        start, one = left.popitem()
        spot, edge = [start], [start]
        while edge:
            y, x = edge.pop()
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if left.get(near) == one:
                    del left[near]
                    spot.append(near)
                    edge.append(near)
        found.append(torch.zeros_like(classes, dtype=torch.bool))
        found[-1][tuple(torch.tensor(spot).T)] = True
    return found


def _likest(pixels: Tensor, spot: Tensor, colour: str) -> Thing | None:
    """The shape that has most in common with a spot, where the spot is."""
    around, beyond = _grown(spot, 2), _grown(spot, 4)
    tints = pixels - pixels.mean(0)  # backgrounds differ in brightness more than in these
    inner, outer = (tints[:, where].median(1).values for where in (spot, beyond & ~around))
    towards = inner - outer
    share = ((tints - outer[:, None, None]) * towards[:, None, None]).sum(0) / towards.square().sum()
    share = share.clamp(0, 1) * around
    at = torch.arange(SIDE) + 0.5
    x, y = float((share.sum(0) * at).sum() / share.sum()), float((share.sum(1) * at).sum() / share.sum())
    left, top = (min(max(int(middle) - _VIEW // 2, 0), SIDE - _VIEW) for middle in (x, y))
    share = share[top : top + _VIEW, left : left + _VIEW]
    candidates = list(product(RADII, SHAPES, np.linspace(-0.24, 0.24, 7)))
    rows = [(x - left, y - top, RADII[size], *outline(form, turn)) for size, form, turn in candidates]
    view = at[:_VIEW]
    shapes = _blurred(covered(torch.tensor([rows], dtype=torch.float32), view[None], view[:, None])[0])
    alike = torch.minimum(shapes, share).sum((1, 2)) / torch.maximum(shapes, share).sum((1, 2))
    best = int(alike.argmax())
    if alike[best] < _ALIKE:
        return None
    size, form, _ = candidates[best]
    cell = int(y / SIDE * 3) * 3 + int(x / SIDE * 3)
    return Thing(size, colour, form, cell, x, y)


def _grown(spot: Tensor, by: int) -> Tensor:
    return functional.max_pool2d(spot[None].float(), 2 * by + 1, 1, by)[0] > 0


def _blurred(pixels: Tensor) -> Tensor:
    return functional.avg_pool2d(pixels, 3, 1, 1, count_include_pad=False)
