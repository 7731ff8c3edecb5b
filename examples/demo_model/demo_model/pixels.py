"""Paints scenes in batches, on any device, and finds in a picture's pixels what is there."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from demo_model.captions import GROUNDS, MOST
from demo_model.scenes import COLOURS, PLACES, RADII, SHAPES, SIDE, Thing

_CORNERS = (32, 4, 3, 5)
_INNER = 0.45
"""Of a star: the radius between two points."""
_FAR = -1000.0
"""Where things are that a picture lacks."""
_CLOUDS = 8
_CHROMA = 84
_SPECK = 24
"""Pixels; smaller spots of colour are no things."""
_VIEW = 44
"""Pixels around a spot that are compared with shapes."""
_ALIKE = 0.6
"""Intersection over union of a spot and the shape that it is taken for."""


def coverage(x: Tensor, y: Tensor, radius: Tensor, shape: Tensor, turn: Tensor, side: int = SIDE) -> Tensor:
    """[..., side, side]: how much of each pixel lies in a shape, all arguments [...]; `shape`: index into `SHAPES`.

    All shapes are a sector between a corner and the middle of an edge (of a star: an inner corner), mirrored and
    repeated; what counts is the distance from the line that closes the sector.
    """
    half = math.pi / sum(count * (shape == index) for index, count in enumerate(_CORNERS))
    near = torch.where(shape == SHAPES.index("star"), radius * _INNER, radius * half.cos())
    first = turn - math.pi / 2 + math.pi / 4 * (shape == SHAPES.index("square"))
    at = torch.arange(side, device=x.device) + 0.5
    dx, dy = at - x[..., None, None], at[:, None] - y[..., None, None]
    half, near, first, radius = (one[..., None, None] for one in (half, near, first, radius))
    angle = (torch.atan2(dy, dx) - first) % (2 * half)
    angle = torch.minimum(angle, 2 * half - angle)
    away = torch.hypot(dx, dy)
    across, along = near * half.sin(), radius - near * half.cos()
    inside = ((radius - away * angle.cos()) * across - away * angle.sin() * along) / torch.hypot(across, along)
    return (inside + 0.5).clamp(0, 1)


def paint(things: Tensor, grounds: Tensor) -> Tensor:
    """[B, 3, SIDE, SIDE], 0 to 255, of `thing_rows` [B, MOST, 8] and `ground_row`s [B, 10 + 64]."""
    first, second, plan, clouds = grounds.split([3, 3, 4, _CLOUDS**2], -1)
    kind, a, b, c = plan[..., None, None].unbind(1)
    at = torch.arange(SIDE, device=things.device) / SIDE
    slope = at * a + at[:, None] * b
    coarse = clouds.reshape(-1, 1, _CLOUDS, _CLOUDS)
    cloudy = functional.interpolate(coarse, (SIDE, SIDE), mode="bicubic", antialias=False)[:, 0] * 0.5
    mixes = torch.stack([torch.zeros_like(slope), slope.abs(), (torch.sin(slope * c) + 1) / 4, cloudy], 1).clamp(0, 1)
    mix = mixes.gather(1, kind.long()[:, None].expand(-1, 1, SIDE, SIDE))
    picture = first[..., None, None] * (1 - mix) + second[..., None, None] * mix
    x, y, radius, shape, turn = things[..., :5].unbind(-1)
    for colour, covered in zip(things[..., 5:].unbind(1), coverage(x, y, radius, shape, turn).unbind(1), strict=True):
        picture = torch.lerp(picture, colour[..., None, None], covered[:, None])
    return picture


def ground_row(rng: random.Random, ground: str | None, clouds: np.ndarray, plain: bool = False) -> list[float]:
    """A random background as in `scenes.py`; `ground`: "dark" or "pale" throughout, or None; `clouds`: 64 numbers from
    0 to 1; `plain`: of one colour."""
    bases = [{"dark": 0, "pale": 190}.get(ground or "", rng.choice((0, 190))) for _ in range(2)]
    colours = [base + 59 * rng.random() for base in bases for _ in range(3)]
    kind = 0 if plain else rng.choices(range(4), (4, 3, 2, 2))[0]  # a plain one more often than there
    a, b = (rng.random(), rng.random()) if kind == 1 else (rng.uniform(-1, 1), rng.uniform(-1, 1))
    return [*colours, kind, a, b, rng.uniform(20, 60), *clouds.tolist()]


def thing_rows(things: Sequence[Thing], looks: np.ndarray) -> list[list[float]]:
    """`MOST` rows (x, y, radius, shape, turn, red, green, blue). `looks`: what turn and shade of the thing in a cell
    depend on, [9, 4], numbers from 0 to 1."""
    rows = []
    for thing in things:
        turn, *shade = looks[thing.cell].tolist()
        colour = [
            min(max(base + 28 * more - 14, 0), 255) for base, more in zip(COLOURS[thing.colour], shade, strict=True)
        ]
        rows.append([thing.x, thing.y, RADII[thing.size], SHAPES.index(thing.shape), 0.4 * turn - 0.2, *colour])
    return rows + [[_FAR, _FAR, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * (MOST - len(rows))


def painted(things: Sequence[Thing], ground: str | None, seed: int) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]: one picture of things on a random background."""
    looks, clouds = random_looks(seed, 1)
    rows = thing_rows(things, looks[0]), ground_row(random.Random(seed), ground, clouds[0])
    return paint(torch.tensor([rows[0]]), torch.tensor([rows[1]]))[0].permute(1, 2, 0).round().byte().numpy()


def random_looks(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of `count` pictures: [count, 9, 4] for `thing_rows` and [count, 64] for `ground_row`."""
    numbers = np.random.default_rng(seed).random((count, len(PLACES) * 4 + _CLOUDS**2))
    return numbers[:, : len(PLACES) * 4].reshape(count, len(PLACES), 4), numbers[:, len(PLACES) * 4 :]


def found_in(picture: np.ndarray) -> list[Thing] | None:
    """The things in a picture, uint8 [SIDE, SIDE, 3], by plain checks: spots of one colour, compared with each shape.
    None where a spot looks like none of them."""
    pixels = _blurred(torch.from_numpy(picture).permute(2, 0, 1).float())
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
    return GROUNDS[0] if high < 100 else GROUNDS[1] if low > 150 else None


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
    sorts = (
        torch.tensor(list(RADII.values())).float(),
        torch.arange(len(SHAPES)).float(),
        torch.linspace(-0.24, 0.24, 7),
    )
    radius, shape, turn = torch.cartesian_prod(*sorts).unbind(-1)
    xs, ys = torch.full_like(turn, x - left), torch.full_like(turn, y - top)
    shapes = _blurred(coverage(xs, ys, radius, shape, turn, _VIEW))
    alike = torch.minimum(shapes, share).sum((1, 2)) / torch.maximum(shapes, share).sum((1, 2))
    best = int(alike.argmax())
    if alike[best] < _ALIKE:
        return None
    size = {radius: size for size, radius in RADII.items()}[int(radius[best])]
    cell = int(y / SIDE * 3) * 3 + int(x / SIDE * 3)
    return Thing(size, colour, SHAPES[int(shape[best])], cell, x, y)


def _grown(spot: Tensor, by: int) -> Tensor:
    return functional.max_pool2d(spot[None].float(), 2 * by + 1, 1, by)[0] > 0


def _blurred(pixels: Tensor) -> Tensor:
    return functional.avg_pool2d(pixels, 3, 1, 1, count_include_pad=False)
