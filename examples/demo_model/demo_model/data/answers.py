"""Batches of pictures, clips or nothing, with written questions and their answers.

All questions about one picture are one sequence: each sees the picture and itself, none sees another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from demo_model.data import IGNORED
from demo_model.data.prompts import encode, prefix
from demo_model.data.questions import JSON, STYLES, Question, about_clip, about_picture, without_picture
from demo_model.data.scenes import Canvas, Scene, canvas, draw_alike, draw_clip, draw_scene

KINDS = ("picture", "clip", "picture", "picture", "nothing")
"""Of the steps' batches, in turn."""
ALIKE = 0.4
"""Of the training's pictures: in so many are several things alike."""
_ALIGNED = 32
"""Sequences of a batch are filled up to a multiple of so many tokens: fewer sizes of memory to find."""


@dataclass(frozen=True)
class Answers:
    """Sequences of one picture, clip or nothing each, and questions about it.

    `kind`: for the log. `drawn`: their frames, in order. `ids`, `branches`: int64 [sequences, tokens]; a branch is 0
    for what all questions see, then the number of the question, and -1 where a sequence is filled up. `positions`:
    int64 [3, sequences, tokens]. `asked`: int64 [answers' tokens], where in `ids`, flattened, the token before each
    lies; `targets`: the tokens.
    """

    kind: str
    drawn: Canvas | None
    ids: Tensor
    branches: Tensor
    positions: Tensor
    asked: Tensor
    targets: Tensor


class Sequences:
    """Makes batches of `Answers`. `kinds`: "picture", "clip", "nothing", of which each step takes one in turn."""

    def __init__(self, model_dir: Path, size: int, kinds: Sequence[str], questions: int, seed: int = 0) -> None:
        self.model_dir, self.size, self.kinds, self.questions, self.seed = model_dir, size, kinds, questions, seed

    def __call__(self, step: int) -> Answers:
        kind, made = self.made(random.Random(f"{self.seed}/{step}"), step)
        return self.batch(kind, made)

    def made(self, rng: random.Random, step: int) -> tuple[str, list[Asked]]:
        """A step's kind and questions; the style of answers is the same for all, since their lengths differ by it."""
        kind, style = self.kinds[step % len(self.kinds)], rng.choice(["", *STYLES])
        count = max(self.questions // 2, 1) if style == JSON else self.questions
        return kind, [asked(kind, rng, count, style, harder=True) for _ in range(self.size)]

    def batch(self, kind: str, made: Sequence[Asked]) -> Answers:
        """Sequences of one kind as tensors."""
        sequences = [sequence(self.model_dir, kind, style, questions) for _, style, questions in made]
        longest = -(-max(len(one.ids) for one in sequences) // _ALIGNED) * _ALIGNED
        labels = torch.stack([_padded(one.labels, longest, IGNORED) for one in sequences]).flatten()
        [asks] = (labels != IGNORED).nonzero(as_tuple=True)
        scenes = [scene for scene, _, _ in made if scene is not None]
        return Answers(
            kind,
            canvas(scenes) if scenes else None,
            ids=torch.stack([_padded(one.ids, longest, 0) for one in sequences]),
            branches=torch.stack([_padded(one.branch, longest, -1) for one in sequences]),
            positions=torch.stack([_padded(one.positions, longest, 0) for one in sequences], 1),
            asked=asks - 1,
            targets=labels[asks],
        )


Asked = tuple[Scene | None, str, list[Question]]
"""What is to be seen, the style of the answers, and questions."""


def asked(kind: str, rng: random.Random, count: int, style: str | None = None, *, harder: bool = False) -> Asked:
    """Something to see and `count` questions about it, without a style in a random one. `harder`: see
    `about_picture`."""
    style = rng.choice(["", *STYLES]) if style is None else style
    if kind == "nothing":
        return None, style, without_picture(rng, style or "full", count)
    if kind == "clip":
        scene = draw_clip(rng)
        return scene, style, about_clip(scene, rng, style or "full", count)
    scene = draw_alike(rng) if harder and rng.random() < ALIKE else draw_scene(rng)
    return scene, style, about_picture(scene, rng, style or "full", count, harder=harder)


@dataclass(frozen=True)
class _Sequence:
    """`branch`: int64 [tokens], 0 for what all questions see, then the number of the question."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    branch: Tensor


def sequence(model_dir: Path, kind: str, style: str, questions: Sequence[Question]) -> _Sequence:
    """One prefix with its questions as branches of it."""
    ids, positions = prefix(model_dir, kind, style)
    after = int(positions.max()) + 1
    parts = [(ids, torch.full_like(ids, IGNORED), positions, torch.zeros_like(ids))]
    for number, question in enumerate(questions, 1):
        asks = encode(model_dir, f"{question.text}<|im_end|>\n<|im_start|>assistant\n")
        says = encode(model_dir, f"{question.answer}<|im_end|>")
        ids = torch.cat([asks, says])
        labels = torch.cat([torch.full_like(asks, IGNORED), says])
        positions = (after + torch.arange(len(ids))).expand(3, -1)
        parts.append((ids, labels, positions, torch.full_like(ids, number)))
    return _Sequence(*(torch.cat(column, -1) for column in zip(*parts, strict=True)))


def _padded(values: Tensor, length: int, filler: int) -> Tensor:
    return functional.pad(values, (0, length - values.shape[-1]), value=filler)
