"""What `segue bench diffusion` asks: pictures of one size from short prompts, with mixed numbers of steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

_COLOURS = ("red", "green", "blue", "golden", "grey", "white")
_THINGS = ("bicycle", "lighthouse", "kettle", "violin", "harbour", "cat", "orchard", "bridge")
_PLACES = ("by the sea", "in the snow", "at night", "under a tree", "on a table", "in the rain")
NEGATIVE = "blurry, dark"


class PictureRequest(msgspec.Struct, frozen=True):
    """One picture."""

    index: int
    prompt: str
    negative_prompt: str
    guidance: float
    size: int
    """Height and width in pixels."""
    steps: int
    seed: int


class PictureOutcome(msgspec.Struct, kw_only=True):
    """One answered request. Times are seconds since the client sent it."""

    index: int
    steps: int
    jct: float
    first_preview: float
    """First picture of any kind at the client: the whole one where the side gives none before."""
    picture: bytes
    """uint8 RGB, row by row."""
    sent: float = 0.0
    """time.monotonic() at the client."""
    network: float = 0.0
    """Seconds of the network's calls for it, where the side tells of each picture."""

    def check(self, request: PictureRequest) -> None:
        """Raise `WrongPicture` unless it has the size that was asked for and is no plain surface."""
        values = np.frombuffer(self.picture, np.uint8)
        if len(values) != 3 * request.size**2 or np.ptp(values) < 3:
            raise WrongPicture(
                f"request {request.index}: {len(values)} values came, or all alike; asked for "
                f"was a picture of {request.size} x {request.size}"
            )


class WrongPicture(Exception):
    """An answer is not what the workload asks for."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Numbers of steps and how often each is asked for."""

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
"""Of clients that come back: so that no two requests are at the same step for long."""
CACHED = Mix((20, 28), (1, 1))
"""For step caches, which compute the first steps and guess some of the others."""
OPEN = Mix((4, 50), (4, 1))
"""Of arrivals: drafts, and now and then a careful one."""


def pictures(mix: Mix, size: int, start: int, count: int, guidance: float, seed: int) -> list[PictureRequest]:
    """Requests `start` to `start + count`. Every run of `sum(weights)` requests has each number of steps as often as
    its weight says, in an order of its own: chance decides who comes first, not how much work there is."""
    pattern = [steps for steps, weight in zip(mix.steps, mix.weights, strict=True) for _ in range(weight)]
    made = []
    for index in range(start, start + count):
        group, place = divmod(index - start, len(pattern))
        order = random.Random(f"{seed}/{mix}/{start}/{group}").sample(pattern, len(pattern))
        draw = random.Random(f"{seed}/{index}")
        prompt = f"a {draw.choice(_COLOURS)} {draw.choice(_THINGS)} {draw.choice(_PLACES)}"
        made.append(PictureRequest(index, prompt, NEGATIVE, guidance, size, order[place], 1000 + index))
    return made


def largest_difference(mine: Sequence[PictureOutcome], theirs: Sequence[PictureOutcome]) -> float:
    """Of equal requests, in [0, 1]; pictures are rounded to 8 bits, so 1/255 is one step of that."""
    differences = [
        np.abs(np.frombuffer(a.picture, np.uint8).astype(int) - np.frombuffer(b.picture, np.uint8)).max()
        for a, b in zip(mine, theirs, strict=True)
    ]
    return max(map(float, differences)) / 255


def mean_difference(mine: Sequence[PictureOutcome], theirs: Sequence[PictureOutcome]) -> float:
    """Of the values of equal requests, in [0, 1]."""
    differences = [
        np.abs(np.frombuffer(a.picture, np.uint8).astype(int) - np.frombuffer(b.picture, np.uint8)).mean()
        for a, b in zip(mine, theirs, strict=True)
    ]
    return float(np.mean(differences)) / 255
