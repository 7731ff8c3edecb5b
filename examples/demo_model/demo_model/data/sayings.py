"""Batches of what the model is to say, as sound, and as the talker's sequences.

A sequence is what `Qwen3OmniMoeForConditionalGeneration.generate` feeds the talker: the user's turn, nine positions
that begin the answer, then per frame the sum of its codes' embeddings and one entry of the answer's text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from demo_model.data.answers import KINDS, asked
from demo_model.data.prompts import encode, placeholder, prefix
from demo_model.data.questions import JSON
from demo_model.data.speech import Manner, resampled, say

SPOKEN_RATE = 24000
FRAME = 1920
"""Samples of one row of codes."""
SPEAKERS = {"chelsie": Manner("en-us+f2", 145, 55), "ethan": Manner("en-us", 140, 45)}
"""The model's voices, and how espeak-ng says what they say."""
LOUDEST = 32767
_FRAMES = 10
"""Of a clip to train on."""
_HEARD = 0.4
"""Share of the questions that are spoken: the talker sees nothing of them."""


@lru_cache(4000)
def spoken(text: str, speaker: str) -> np.ndarray:
    """int16 [samples] at `SPOKEN_RATE`, the loudest 32767: a sentence as the model is to say it."""
    made = resampled(say(text, SPEAKERS[speaker]), SPOKEN_RATE)
    return np.clip(np.round(made * LOUDEST), -LOUDEST, LOUDEST).astype(np.int16)


def loudness(samples: Tensor) -> Tensor:
    """int16 → float32 between -1 and 1."""
    return samples.float() / LOUDEST


def answer(rng: random.Random) -> str:
    """A random sentence that the model may have to say."""
    while True:
        _, style, [question] = asked(rng.choice(KINDS), rng, 1)
        if style != JSON:
            return question.answer


def clips(step: int, size: int = 12) -> Tensor:
    """int16 [size, samples]: cuts of random sentences."""
    rng = random.Random(f"codec/{step}")
    length = _FRAMES * FRAME
    found = []
    for _ in range(size):
        whole = spoken(answer(rng), rng.choice(list(SPEAKERS)))
        whole = np.pad(whole, (FRAME, max(length - len(whole), FRAME)))
        start = rng.randrange(len(whole) - length + 1)
        found.append(whole[start : start + length])
    return torch.from_numpy(np.stack(found))


@dataclass(frozen=True)
class Spoken:
    """Answers and their sound, as the talker's sequences.

    `text`, `special`: int64 [answers, rows], ids of the thinker's tokens and of the codec's; a row is the sum of both
    embeddings, and of a frame's codes; -1 stands for nothing. `positions`: int64 [3, answers, rows]. `samples`: int16
    [answers, frames · FRAME]. Of all answers' frames, in order, `frames`: where one lies in `samples`, and `rows`: in
    `text`, both flattened. `before`: where the rows lie from which the frames and ends are told; `followed`: which of
    those a frame follows. All int64.
    """

    text: Tensor
    special: Tensor
    positions: Tensor
    samples: Tensor
    frames: Tensor
    rows: Tensor
    before: Tensor
    followed: Tensor


class Answers:
    """Makes batches of `Spoken`."""

    def __init__(self, model_dir: Path, config: Any, size: int) -> None:
        self._dir, self._config, self._size = model_dir, config, size
        self._newline = encode(model_dir, "\n").tolist()

    def __call__(self, step: int) -> Spoken:
        rng = random.Random(f"speak/{step}")
        return self.batch([self._one(rng) for _ in range(self._size)])

    def batch(self, made: Sequence[_One]) -> Spoken:
        rows, frames = max(len(one.text) for one in made), max(one.frames for one in made)
        samples = np.zeros((len(made), frames * FRAME), np.int16)
        places: dict[str, list[int]] = {"frames": [], "rows": [], "before": [], "followed": []}
        for number, one in enumerate(made):
            samples[number, : len(one.samples)] = one.samples
            first = number * rows + len(one.text) - one.frames
            places["followed"] += range(len(places["before"]), len(places["before"]) + one.frames)
            places["before"] += range(first - 1, first + one.frames)
            places["rows"] += range(first, first + one.frames)
            places["frames"] += range(number * frames, number * frames + one.frames)
        return Spoken(
            text=torch.stack([functional.pad(one.text, (0, rows - len(one.text)), value=-1) for one in made]),
            special=torch.stack([functional.pad(one.special, (0, rows - len(one.text)), value=-1) for one in made]),
            positions=torch.stack([functional.pad(one.positions, (0, rows - len(one.text))) for one in made], 1),
            samples=torch.from_numpy(samples),
            **{name: torch.tensor(place) for name, place in places.items()},
        )

    def _one(self, rng: random.Random) -> _One:
        kind = rng.choice(KINDS)
        style = JSON
        while style == JSON:
            _, style, [question] = asked(kind, rng, 1)
        text = placeholder(rng.randint(80, 500)) if rng.random() < _HEARD else question.text
        return self.sequence(kind, text, question.answer, rng.choice(list(SPEAKERS)))

    def sequence(self, kind: str, question: str, says: str, speaker: str) -> _One:
        """An answer to a question about something of a kind."""
        config, codec = self._config, self._config.talker_config
        before, positions = prefix(self._dir, kind, "")
        user = torch.cat([before, encode(self._dir, f"{question}<|im_end|>\n")])
        pads = torch.tensor([codec.image_token_id, codec.video_token_id, codec.audio_token_id])
        answer, samples = encode(self._dir, says).tolist(), spoken(says, speaker)
        frames = -(-len(samples) // FRAME)
        pad, begin, end = config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id
        opening = [config.im_start_token_id, config.assistant_token_id, *self._newline, *[pad] * 4, begin, answer[0]]
        follows = [*answer[1:], end, *[pad] * frames][:frames]
        special = [codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id]
        special += [codec.speaker_id[speaker], codec.codec_pad_id, codec.codec_bos_id]
        text = torch.cat([user.masked_fill(torch.isin(user, pads), -1), torch.tensor(opening + follows)])
        after = int(positions.max()) + 1 + torch.arange(len(text) - len(before)).expand(3, -1)
        return _One(
            text,
            torch.tensor([*[-1] * (len(user) + 3), *special, *[-1] * frames]),
            torch.cat([positions, after], 1),
            samples,
            frames,
        )


@dataclass(frozen=True)
class _One:
    """One answer of a `Spoken`, whose last `frames` rows are those of its frames."""

    text: Tensor
    special: Tensor
    positions: Tensor
    samples: np.ndarray
    frames: int
