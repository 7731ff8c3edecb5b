"""Pictures of a few coloured shapes, and short clips of them moving, with what is to be seen in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
_BOX = 36
"""Pixels of a square's side in which the largest shape lies."""
_OUTLINES = {"circle": (32, 1.0), "square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.45)}
"""Of each shape: how many corners, and how far from the centre every second one is, as a share of the radius."""
_BACKGROUNDS = ("plain", "gradient", "stripes", "clouds")
GROUNDS = {"dark": 0, "pale": 190}
"""The least red, green and blue of a background; no thing has such a colour."""


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
    ground: str | None = None
    """A key of `GROUNDS`: a background of one colour, and things upright in their colours. None: any background."""


def draw_scene(rng: random.Random, fewest: int = 1, most: int = 5) -> Scene:
    """A random picture of `fewest` to `most` things in different cells."""
    cells = sorted(rng.sample(range(len(PLACES)), rng.randint(fewest, most)))
    few = rng.random() < 0.4  # few kinds, so that there is something to count
    colours = rng.sample(list(COLOURS), 2) if few else list(COLOURS)
    shapes = rng.sample(SHAPES, 2) if few else SHAPES
    return Scene(tuple(_thing(rng, cell, colours, shapes) for cell in cells), rng.getrandbits(32))


def draw_alike(rng: random.Random) -> Scene:
    """A random picture of two to five things of few sorts, so that there are several of one colour and shape; some as
    `captions.drawing` has them."""
    cells = sorted(rng.sample(range(len(PLACES)), rng.randint(2, 5)))
    sorts = [(rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(rng.randint(1, 3))]
    ground, things = rng.choice([None, *GROUNDS]), []
    for cell in cells:
        colour, shape = rng.choice(sorts)
        thing = _thing(rng, cell, [colour], [shape])
        x, y = centre(cell) if ground else (thing.x, thing.y)
        things.append(replace(thing, x=x, y=y))
    return Scene(tuple(things), rng.getrandbits(32), ground=ground)


def draw_clip(rng: random.Random) -> Scene:
    """A random clip: two or three things that all look different, of which one or two move, one after the other."""
    while True:
        scene = draw_scene(rng, 2, 3)
        if len({(thing.colour, thing.shape) for thing in scene.things}) == len(scene.things):
            break
    moving = rng.sample(range(len(scene.things)), rng.randint(1, 2))
    moves = tuple((index, rng.choice(_free(scene.things[index].cell))) for index in moving)
    return replace(scene, moves=moves)


def moments(scene: Scene) -> list[tuple[Thing, ...]]:
    """The things of each frame of a clip, or of the one picture: each move takes an equal part of the frames."""
    if not scene.moves:
        return [scene.things]
    part = FRAMES // len(scene.moves)
    frames = []
    for frame in range(FRAMES):
        things = list(scene.things)
        for order, (index, direction) in enumerate(scene.moves):
            gone = min(max((frame - order * part + 1) / part, 0.0), 1.0) * _CELL
            x, y = DIRECTIONS[direction]
            thing = things[index]
            things[index] = replace(thing, x=thing.x + x * gone, y=thing.y + y * gone)
        frames.append(tuple(things))
    return frames


def picture(scene: Scene) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]."""
    return clip(scene)[0]


def clip(scene: Scene) -> np.ndarray:
    """uint8 [frames, SIDE, SIDE, 3]; equal scenes look equal, noise included."""
    return painted(canvas([scene]), torch.Generator().manual_seed(scene.background)).numpy()


def centre(cell: int) -> tuple[float, float]:
    """Of a cell: x, y."""
    return (cell % 3 + 0.5) * _CELL, (cell // 3 + 0.5) * _CELL


def _thing(rng: random.Random, cell: int, colours: list[str], shapes: tuple[str, ...] | list[str]) -> Thing:
    """A thing anywhere in a cell."""
    size, colour, shape = rng.choice(list(RADII)), rng.choice(colours), rng.choice(shapes)
    spare = _CELL / 2 - RADII[size] - 1
    x, y = (middle + rng.uniform(-spare, spare) for middle in centre(cell))
    return Thing(size, colour, shape, cell, x, y)


def _free(cell: int) -> list[str]:
    """Directions in which a thing can leave a cell and stay in the picture."""
    x, y = cell % 3, cell // 3
    return [name for name, (dx, dy) in DIRECTIONS.items() if 0 <= x + dx <= 2 and 0 <= y + dy <= 2]


# drawing, many pictures at once and on any device


@dataclass(frozen=True)
class Canvas:
    """Pictures before they are drawn.

    `things`: float32 [pictures, things, 9]: x, y, radius, angle between corners, share of the radius of every second
    corner, angle of the first corner, red, green, blue; a radius of 0 is no thing. `colours`: float32
    [pictures, 2, 3, 1, 1], mixed as `mixing` says: float32 [pictures, 6], which are the weights of gradient, stripes
    and clouds, the slopes in x and y, and the frequency of stripes. `clouds`: float32 [pictures, 1, 8, 8]. `noise`:
    float32 [pictures], its deviation.
    """

    things: Tensor
    colours: Tensor
    mixing: Tensor
    clouds: Tensor
    noise: Tensor


def canvas(scenes: Sequence[Scene]) -> Canvas:
    """All frames of each scene, in order."""
    most = max(len(scene.things) for scene in scenes)
    made = [_canvas(scene, most) for scene in scenes]
    return Canvas(
        *(torch.from_numpy(np.concatenate([getattr(one, field.name) for one in made])) for field in fields(Canvas))
    )


@dataclass(frozen=True)
class _Arrays:
    """A `Canvas` of one scene."""

    things: np.ndarray
    colours: np.ndarray
    mixing: np.ndarray
    clouds: np.ndarray
    noise: np.ndarray


def _canvas(scene: Scene, most: int) -> _Arrays:
    rng = np.random.default_rng(scene.background)
    least = GROUNDS[scene.ground] if scene.ground else rng.choice(list(GROUNDS.values()), (2, 1))
    colours = rng.integers(0, 60, (2, 3)) + least
    kind = "plain" if scene.ground else _BACKGROUNDS[rng.integers(len(_BACKGROUNDS))]
    slopes = rng.uniform(0 if kind == "gradient" else -1, 1, 2)
    mixing = [*(float(kind == one) for one in _BACKGROUNDS[1:]), *slopes, rng.uniform(20, 60)]
    clouds, noise = rng.random((1, 8, 8)), rng.uniform(0, 9)
    # by cell, so that a thing looks the same whatever else is in the picture
    varied = 0 if scene.ground else 1
    turns, shades = varied * rng.uniform(-0.2, 0.2, len(PLACES)), varied * rng.integers(-14, 15, (len(PLACES), 3))
    looks = [
        (*outline(one.shape, turns[one.cell]), *np.clip(np.add(COLOURS[one.colour], shades[one.cell]), 0, 255))
        for one in scene.things
    ]
    frames = moments(scene)
    things = np.zeros((len(frames), most, 9))
    for index, frame in enumerate(frames):
        for number, (thing, look) in enumerate(zip(frame, looks, strict=True)):
            things[index, number] = (thing.x, thing.y, RADII[thing.size], *look)
    of_each = (
        np.asarray(one)[None].repeat(len(frames), 0) for one in (colours[..., None, None], mixing, clouds, noise)
    )
    return _Arrays(*(one.astype(np.float32) for one in (things, *of_each)))


def outline(shape: str, turn: float) -> tuple[float, float, float]:
    """Of a shape turned by so many radians: numbers 3 to 5 of a `Canvas`'s thing."""
    corners, inner = _OUTLINES[shape]
    first = -np.pi / 2 + turn + (np.pi / 4 if shape == "square" else 0.0)
    return 2 * np.pi / corners, inner, first


def painted(drawn: Canvas, generator: torch.Generator | None = None) -> Tensor:
    """uint8 [pictures, SIDE, SIDE, 3], on the canvas's device; the noise is the generator's."""
    image = clean(drawn)
    noise = torch.randn(image.shape, generator=generator, device=image.device)
    return (image + noise * drawn.noise[:, None, None, None]).clamp(0, 255).to(torch.uint8)


def clean(drawn: Canvas) -> Tensor:
    """float32 [pictures, SIDE, SIDE, 3], 0 to 255: without noise. Each thing is painted in a box around it."""
    device = drawn.things.device
    line = torch.arange(SIDE, device=device, dtype=torch.float32)
    y, x = line[:, None], line[None]
    gradient, stripes, clouds, by_x, by_y, frequency = drawn.mixing[:, :, None, None].unbind(1)
    slope = (x * by_x + y * by_y) / SIDE
    coarse = functional.interpolate(drawn.clouds, size=(SIDE, SIDE), mode="bicubic", align_corners=False)[:, 0]
    mix = gradient * slope + stripes * (torch.sin(slope * frequency) + 1) / 4 + clouds * coarse / 2
    below, above = drawn.colours.flatten(2)[:, :, None, None].unbind(1)  # [pictures, 1, 1, 3]
    image = torch.lerp(below, above, mix.clamp(0, 1)[..., None])
    pictures, box = torch.arange(len(image), device=device)[:, None, None], torch.arange(_BOX, device=device)
    for thing in drawn.things.unbind(1):
        left, top = ((thing[:, axis].long() - _BOX // 2).clamp(0, SIDE - _BOX)[:, None] + box for axis in (0, 1))
        where = (pictures, top[:, :, None], left[:, None])
        share = covered(thing[:, None, :6], left[:, None, None] + 0.5, top[:, None, :, None] + 0.5)[:, 0, ..., None]
        image[where] = torch.lerp(image[where], thing[:, None, None, 6:], share)
    return image


def covered(shapes: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[pictures, things, 6], the first six numbers of a `Canvas`'s things, and the pixels' middles, [1, columns] and
    [rows, 1], of each thing or of all → share of each pixel that a thing covers, [pictures, things, rows, columns].

    A pixel's angle is folded into the sector between a corner and the next; its depth is how far it is inside of the
    edge that joins them.
    """
    middle_x, middle_y, radius, sector, inner, first = shapes[..., None, None].unbind(2)
    right, down = x - middle_x, y - middle_y
    sector = sector.clamp(min=1e-3)  # 0 where there is no thing
    angle = torch.remainder(torch.atan2(down, right) - first, 2 * sector)
    angle = torch.minimum(angle, 2 * sector - angle)
    edge = torch.hypot(right, down) * (angle.sin() + inner * (sector - angle).sin())
    full = (inner * radius * sector.sin()).clamp(min=1e-6)
    far = inner * radius * sector.sin() / (1 + inner**2 - 2 * inner * sector.cos()).clamp(min=1e-6).sqrt()
    return torch.where(radius > 0, (far * (1 - edge / full) + 0.5).clamp(0, 1), 0.0)
