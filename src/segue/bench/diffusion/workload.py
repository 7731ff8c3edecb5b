"""The requests of `segue bench diffusion`: images of one size from short prompts, with mixed numbers of steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from segue.bench.harness.load import LoadSlice
from segue.bench.harness.scenarios import LoadOutcome

_COLOURS = ("red", "green", "blue", "golden", "grey", "white")
_THINGS = ("bicycle", "lighthouse", "kettle", "violin", "harbour", "cat", "orchard", "bridge")
_PLACES = ("by the sea", "in the snow", "at night", "under a tree", "on a table", "in the rain")
NEGATIVE = "blurry, dark"


class ImageRequest(msgspec.Struct, frozen=True):
    """A request for one image."""

    index: int
    prompt: str
    negative_prompt: str
    guidance: float
    size: int
    """Height and width in pixels."""
    steps: int
    seed: int


class ImageOutcome(LoadOutcome, kw_only=True):
    """One answered request."""

    steps: int
    first_preview: float
    """Time of the first image at the client: the final image if the side sends no previews."""
    image: bytes
    """uint8 RGB, row by row."""
    network: float = 0.0
    """Seconds of the network's calls for it, if the side reports them per image."""

    def check(self, request: ImageRequest) -> None:
        """Raise `WrongImage` unless the image has the requested size and more than one colour."""
        values = np.frombuffer(self.image, np.uint8)
        if len(values) != 3 * request.size**2 or np.ptp(values) < 3:
            raise WrongImage(
                f"request {request.index}: {len(values)} values came, or all alike; asked for "
                f"was an image of {request.size} x {request.size}"
            )


ImageSlice = LoadSlice[ImageOutcome]


def steps_of(outcome: ImageOutcome) -> float:
    return outcome.steps


class WrongImage(Exception):
    """An answer does not match its request."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Numbers of steps and their relative frequencies."""

    steps: tuple[int, ...]
    weights: tuple[int, ...]

    def __str__(self) -> str:
        total = sum(self.weights)
        return ", ".join(
            f"{weight / total:.0%} of {steps} steps" for steps, weight in zip(self.steps, self.weights, strict=True)
        )

    @property
    def mean(self) -> float:
        return sum(s * w for s, w in zip(self.steps, self.weights, strict=True)) / sum(self.weights)


CLOSED = Mix((8, 12), (1, 1))
"""For closed loops: mixed, so that requests do not stay at the same step for long."""
CACHED = Mix((20, 28), (1, 1))
"""For step caches, which compute the first steps and predict some of the others."""
OPEN = Mix((4, 50), (4, 1))
"""For arrivals: mostly drafts, sometimes a high-quality image."""


def images(mix: Mix, size: int, start: int, count: int, guidance: float, seed: int) -> list[ImageRequest]:
    """Requests `start` to `start + count`. Every run of `sum(weights)` requests has each number of steps as often as
    its weight says, in random order: chance decides the order, not the amount of work."""
    pattern = [steps for steps, weight in zip(mix.steps, mix.weights, strict=True) for _ in range(weight)]
    made = []
    for index in range(start, start + count):
        group, place = divmod(index - start, len(pattern))
        order = random.Random(f"{seed}/{mix}/{start}/{group}").sample(pattern, len(pattern))
        draw = random.Random(f"{seed}/{index}")
        prompt = f"a {draw.choice(_COLOURS)} {draw.choice(_THINGS)} {draw.choice(_PLACES)}"
        made.append(ImageRequest(index, prompt, NEGATIVE, guidance, size, order[place], 1000 + index))
    return made


def differences(mine: Sequence[ImageOutcome], theirs: Sequence[ImageOutcome]) -> dict[str, Any]:
    """Largest and mean difference between images of equal requests, in [0, 1], as fields of a side. Images are rounded
    to 8 bits, so the smallest difference is 1/255."""
    images = [[np.frombuffer(one.image, np.uint8) for one in both] for both in zip(mine, theirs, strict=True)]
    apart = [np.abs(a.astype(int) - b) for a, b in images]
    return {
        "largest_difference": max(float(one.max()) for one in apart) / 255,
        "mean_difference": float(np.mean([one.mean() for one in apart])) / 255,
    }
