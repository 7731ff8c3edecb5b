"""Batches of pictures and clips, with what lies under each of their tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from demo_model.data import IGNORED
from demo_model.data.prompts import FRAMES_PER_PATCH, GRID, TOKEN
from demo_model.data.scenes import (
    COLOURS,
    DIRECTIONS,
    FRAMES,
    SHAPES,
    SIDE,
    Canvas,
    Scene,
    canvas,
    draw_clip,
    draw_scene,
    moments,
)


@dataclass(frozen=True)
class Cells:
    """Pictures, or pairs of a clip's frames, and what lies under each of their tokens. `things`: int64 [tokens, 5]:
    colour, shape, size, movement and place of the thing whose centre is there, or -100."""

    drawn: Canvas
    things: Tensor


def cells(step: int, size: int = 96, seed: int = 0) -> Cells:
    """A batch of pictures, or, every fourth, of clips: as many pairs of frames."""
    rng = random.Random(f"cells/{seed}/{step}")
    pairs = FRAMES // FRAMES_PER_PATCH
    if step % 4 == 3:
        scenes = [draw_clip(rng) for _ in range(max(size // pairs, 1))]
    else:
        scenes = [draw_scene(rng, 2, 7) for _ in range(size)]
    return Cells(canvas(scenes), torch.cat([_things(scene) for scene in scenes]))


def _things(scene: Scene) -> Tensor:
    """int64 [pairs of frames · GRID², 5], of the tokens row by row."""
    frames = moments(scene)
    pairs = [(frames[first], frames[min(first + 1, len(frames) - 1)]) for first in range(0, len(frames), 2)]
    found = torch.full((len(pairs), GRID, GRID, 5), IGNORED)
    found[..., 0] = 0
    for number, pair in enumerate(pairs):
        for thing, later in zip(*pair, strict=True):
            x, y = (thing.x + later.x) / 2, (thing.y + later.y) / 2
            row, column = min(int(y) // TOKEN, GRID - 1), min(int(x) // TOKEN, GRID - 1)
            move = (_sign(later.x - thing.x), _sign(later.y - thing.y))
            moved = 1 + list(DIRECTIONS.values()).index(move) if move != (0, 0) else 0
            colour, shape = list(COLOURS).index(thing.colour), SHAPES.index(thing.shape)
            place = min(int(3 * y / SIDE), 2) * 3 + min(int(3 * x / SIDE), 2)
            found[number, row, column] = torch.tensor([1 + colour, shape, int(thing.size == "big"), moved, place])
    return found.flatten(0, 2)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
