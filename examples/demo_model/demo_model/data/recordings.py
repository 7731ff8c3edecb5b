"""Batches of recordings: what is said, or questions and their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo_model.data.answers import Answers, Sequences
from demo_model.data.prompts import encode, placeholder
from demo_model.data.questions import Question, about_clip, about_picture, without_picture
from demo_model.data.scenes import draw_clip, draw_scene
from demo_model.data.speech import VOICES, Manner, resampled, say

HEARD_RATE = 16000
HOP, WINDOW = 160, 400
"""Samples from one spectrum to the next, and of each."""
LOUDEST = 16384
"""What a sample of 1 is in a batch's int16."""


def manner(rng: random.Random) -> Manner:
    """A random voice, speed and pitch."""
    return Manner(rng.choice(VOICES), rng.randint(120, 200), rng.randint(30, 70), rng.choice([0, 0, 0, 3]))


def sound(text: str, rng: random.Random) -> np.ndarray:
    """float32 [samples] at `HEARD_RATE`: a question said in a random manner, with noise and pauses around it."""
    said = resampled(say(text, manner(rng)), HEARD_RATE)
    rest = [np.zeros(int(HEARD_RATE * rng.uniform(0.02, 0.3)), np.float32) for _ in range(2)]
    whole = np.concatenate([rest[0], said * rng.uniform(0.4, 1.5), rest[1]])
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 10 ** rng.uniform(-4, -2), len(whole))
    return (whole + noise).astype(np.float32)


@dataclass(frozen=True)
class Recordings:
    """`samples`: int16 [recordings, samples], continued at both ends as the spectra's windows need it. `lengths`:
    spectra of each."""

    samples: Tensor
    lengths: tuple[int, ...]


def recordings(sounds: Sequence[np.ndarray]) -> Recordings:
    """float32 [samples] at `HEARD_RATE` each."""
    lengths = tuple(len(one) // HOP for one in sounds)
    whole = np.zeros((len(sounds), max(lengths) * HOP + WINDOW), np.int16)
    for row, one in zip(whole, sounds, strict=True):
        ends = np.pad(one, WINDOW // 2, mode="reflect")[: len(row)]
        row[: len(ends)] = np.clip(np.round(ends * LOUDEST), -32768, 32767)
    return Recordings(torch.from_numpy(whole), lengths)


@dataclass(frozen=True)
class Dictation:
    """Recordings and the tokens of their words, `counts` of each."""

    said: Recordings
    words: Tensor
    counts: tuple[int, ...]


class Dictations:
    """Makes batches of `Dictation`."""

    def __init__(self, model_dir: Path, size: int) -> None:
        self._dir, self._size = model_dir, size

    def __call__(self, step: int) -> Dictation:
        rng = random.Random(f"dictation/{step}")
        texts = [question(rng).text for _ in range(self._size)]
        words = [encode(self._dir, text) for text in texts]
        said = recordings([sound(text, rng) for text in texts])
        return Dictation(said, torch.cat(words), tuple(map(len, words)))


def question(rng: random.Random) -> Question:
    """A random question of any kind."""
    kind = rng.random()
    if kind < 0.5:
        return about_picture(draw_scene(rng), rng, "full", 1)[0]
    return about_clip(draw_clip(rng), rng, "full", 1)[0] if kind < 0.65 else without_picture(rng, "full", 1)[0]


@dataclass(frozen=True)
class SpokenAnswers:
    """Sequences whose questions are spoken, or, without `said`, written."""

    answers: Answers
    said: Recordings | None


class SpokenSequences(Sequences):
    """Makes batches of `SpokenAnswers`; every second batch's questions are spoken."""

    def spoken(self, step: int) -> SpokenAnswers:
        if step % 2:
            return SpokenAnswers(self(step // 2), None)
        rng = random.Random(f"spoken/{self.seed}/{step}")
        kind, made = self.made(rng, step // 2)
        said = recordings([sound(one.text, rng) for _, _, questions in made for one in questions])
        lengths = iter(said.lengths)
        replaced = [
            (scene, style, [replace(one, text=placeholder(next(lengths))) for one in questions])
            for scene, style, questions in made
        ]
        return SpokenAnswers(self.batch(kind, replaced), said)
