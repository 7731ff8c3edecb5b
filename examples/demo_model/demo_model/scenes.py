"""Pictures of a few coloured shapes, and short clips of them moving, with what is to be seen in them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

SIDE = 128
"""Pixels of a picture's width and height."""
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (245, 130, 30),
}
SHAPES = ("circle", "square", "triangle", "star")
RADII = {"small": 8, "big": 16}
"""Half of a shape's width, pixels."""
PLACES = ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right")
"""The nine cells of a picture, row by row."""
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
FRAMES = 8
"""Frames of a clip, two a second."""
_CELL = SIDE / 3
_FINER = 3
"""How much larger a picture is drawn than it is shown, for smooth edges."""


@dataclass(frozen=True)
class Thing:
    """One shape. `x`, `y`: its centre, pixels; `cell`: index into `PLACES`."""

    size: str
    colour: str
    shape: str
    cell: int
    x: float
    y: float

    @property
    def place(self) -> str:
        return PLACES[self.cell]


@dataclass(frozen=True)
class Scene:
    """Things in reading order on a background. `moves`: of a clip, (index of the thing, direction) in order of time."""

    things: tuple[Thing, ...]
    background: int
    """Seed of the background and its noise."""
    moves: tuple[tuple[int, str], ...] = ()


def draw_scene(rng: random.Random, fewest: int = 1, most: int = 5) -> Scene:
    """A random picture of `fewest` to `most` things in different cells."""
    cells = sorted(rng.sample(range(len(PLACES)), rng.randint(fewest, most)))
    few = rng.random() < 0.4  # few kinds, so that there is something to count
    colours = rng.sample(list(COLOURS), 2) if few else list(COLOURS)
    shapes = rng.sample(SHAPES, 2) if few else SHAPES
    return Scene(tuple(_thing(rng, cell, colours, shapes) for cell in cells), rng.getrandbits(32))


def draw_clip(rng: random.Random) -> Scene:
    """A random clip: two or three things that all look different, of which one or two move, one after the other."""
    while True:
        scene = draw_scene(rng, 2, 3)
        if len({(thing.colour, thing.shape) for thing in scene.things}) == len(scene.things):
            break
    moving = rng.sample(range(len(scene.things)), rng.randint(1, 2))
    moves = tuple((index, rng.choice(_free(scene.things[index].cell))) for index in moving)
    return replace(scene, moves=moves)


def picture(scene: Scene) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]."""
    return _painted(scene.things, np.random.default_rng(scene.background))


def clip(scene: Scene) -> np.ndarray:
    """uint8 [FRAMES, SIDE, SIDE, 3]: each move takes an equal part of the frames."""
    part = FRAMES // len(scene.moves)
    frames = []
    for frame in range(FRAMES):
        things = list(scene.things)
        for order, (index, direction) in enumerate(scene.moves):
            gone = min(max((frame - order * part + 1) / part, 0.0), 1.0) * _CELL
            x, y = DIRECTIONS[direction]
            thing = things[index]
            things[index] = replace(thing, x=thing.x + x * gone, y=thing.y + y * gone)
        frames.append(_painted(things, np.random.default_rng(scene.background)))
    return np.stack(frames)


def _thing(rng: random.Random, cell: int, colours: list[str], shapes: tuple[str, ...] | list[str]) -> Thing:
    size = rng.choice(list(RADII))
    free = _CELL / 2 - RADII[size] - 1
    x = (cell % 3 + 0.5) * _CELL + rng.uniform(-free, free)
    y = (cell // 3 + 0.5) * _CELL + rng.uniform(-free, free)
    return Thing(size, rng.choice(colours), rng.choice(shapes), cell, x, y)


def _free(cell: int) -> list[str]:
    """Directions in which a thing can leave a cell and stay in the picture."""
    x, y = cell % 3, cell // 3
    return [name for name, (dx, dy) in DIRECTIONS.items() if 0 <= x + dx <= 2 and 0 <= y + dy <= 2]


def _painted(things: tuple[Thing, ...] | list[Thing], rng: np.random.Generator) -> np.ndarray:
    image = Image.fromarray(_background(rng)).resize((SIDE * _FINER, SIDE * _FINER), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(image)
    for thing in things:
        shade = rng.integers(-14, 15, 3)
        fill = tuple(int(value) for value in np.clip(np.array(COLOURS[thing.colour]) + shade, 0, 255))
        corners = [
            (_FINER * (thing.x + x), _FINER * (thing.y + y)) for x, y in _outline(thing, float(rng.uniform(-0.2, 0.2)))
        ]
        pen.polygon(corners, fill=fill)
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)).astype(np.float32)
    noisy = small + rng.normal(0, rng.uniform(0, 9), small.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)


def _outline(thing: Thing, turn: float) -> list[tuple[float, float]]:
    """Corners around (0, 0). `turn`: radians."""
    radius = RADII[thing.size]
    corners, inner = {"circle": (32, 1.0), "square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.45)}[thing.shape]
    first = -np.pi / 2 + turn + (np.pi / 4 if thing.shape == "square" else 0.0)
    angles = [first + 2 * np.pi * corner / corners for corner in range(corners)]
    lengths = [radius * (inner if corner % 2 else 1.0) for corner in range(corners)]
    return [(length * np.cos(angle), length * np.sin(angle)) for length, angle in zip(lengths, angles, strict=True)]


def _background(rng: np.random.Generator) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]: plain, a gradient, stripes or clouds, of a grey or pale colour that no thing has."""
    first, second = rng.integers(0, 60, 3) + rng.choice([0, 190]), rng.integers(0, 60, 3) + rng.choice([0, 190])
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    kind = rng.integers(4)
    if kind == 0:
        mix = np.zeros((SIDE, SIDE))
    elif kind == 1:
        mix = x * rng.uniform(0, 1) + y * rng.uniform(0, 1)
    elif kind == 2:
        mix = (np.sin((x * rng.uniform(-1, 1) + y * rng.uniform(-1, 1)) * rng.uniform(20, 60)) + 1) / 4
    else:
        coarse = Image.fromarray((rng.random((8, 8)) * 255).astype(np.uint8))
        mix = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) / 500
    mix = np.clip(mix, 0, 1)[..., None]
    return (first * (1 - mix) + second * mix).astype(np.uint8)
