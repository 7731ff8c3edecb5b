"""Teach the model to hear: the audio encoder alone to write down what is said, then all to answer spoken questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model import see
from demo_model.muon import inside
from demo_model.networks import audio_encoder, heard, language_model, rows_of, vision
from demo_model.questions import Question, about_clip, about_picture, without_picture
from demo_model.scenes import draw_clip, draw_scene
from demo_model.speech import VOICES, Manner, resampled, say
from demo_model.training import Part

HEARD_RATE = 16000
_HOP, _WINDOW = 160, 400
"""Samples from one spectrum to the next, and of each."""
_LOUDEST = 16384
"""What a sample of 1 is in a batch's int16."""
_READ_EVERY = 20
"""Steps after which it is counted how many recordings are written down without a fault."""


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
    lengths = tuple(len(one) // _HOP for one in sounds)
    whole = np.zeros((len(sounds), max(lengths) * _HOP + _WINDOW), np.int16)
    for row, one in zip(whole, sounds, strict=True):
        ends = np.pad(one, _WINDOW // 2, mode="reflect")[: len(row)]
        row[: len(ends)] = np.clip(np.round(ends * _LOUDEST), -32768, 32767)
    return Recordings(torch.from_numpy(whole), lengths)


def spectra(given: Recordings) -> Tensor:
    """float32 [recordings, mel bins, spectra], as the library's processor gives them, and zero after each one's end."""
    device = given.samples.device
    samples = given.samples.float() / _LOUDEST
    window = torch.hann_window(_WINDOW, device=device)
    power = torch.stft(samples, _WINDOW, _HOP, window=window, center=False, return_complex=True).abs() ** 2
    power = power[..., : max(given.lengths)]
    with torch.autocast(device.type, enabled=False):
        mels = torch.einsum("bft,fm->bmt", power, _filters().to(device)).clamp(min=1e-10).log10()
    lengths = torch.tensor(given.lengths, device=device)
    known = (torch.arange(mels.shape[2], device=device) < lengths[:, None])[:, None]
    loudest = mels.masked_fill(~known, -10.0).amax((1, 2), keepdim=True)
    return ((torch.maximum(mels, loudest - 8.0) + 4.0) / 4.0).masked_fill(~known, 0.0)


@cache
def _filters() -> Tensor:
    from transformers.audio_utils import mel_filter_bank

    bins = mel_filter_bank(1 + _WINDOW // 2, 128, 0.0, HEARD_RATE / 2, HEARD_RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(bins).float()


# the audio encoder alone


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
        words = [see.encode(self._dir, text) for text in texts]
        said = recordings([sound(text, rng) for text in texts])
        return Dictation(said, torch.cat(words), tuple(map(len, words)))


def question(rng: random.Random) -> Question:
    """A random question of any kind."""
    kind = rng.random()
    if kind < 0.5:
        return about_picture(draw_scene(rng), rng, "full", 1)[0]
    return about_clip(draw_clip(rng), rng, "full", 1)[0] if kind < 0.65 else without_picture(rng, "full", 1)[0]


def dictation_part(model: Any, model_dir: Path, *, size: int = 32) -> Part:
    """Trains the audio encoder by CTC (Graves et al. 2006) over the tokenizer's tokens and, as the last one, the blank.

    A row says a token by being like its embedding, so that the language model later hears words much as it reads them.
    """
    embedding = language_model(model).embed_tokens.requires_grad_(False)
    vocabulary: int = embedding.num_embeddings
    blank = nn.Linear(embedding.embedding_dim, 1)

    def loss(batch: Dictation, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        lengths = [rows_of(length) for length in batch.said.lengths]
        rows = heard(model, spectra(batch.said), batch.said.lengths)
        shares = torch.cat([functional.linear(rows, embedding.weight), blank(rows)], -1).float().log_softmax(-1)
        logits = nn.utils.rnn.pad_sequence(list(shares.split(lengths)))
        found = functional.ctc_loss(
            logits, batch.words, torch.tensor(lengths), torch.tensor(batch.counts), blank=vocabulary, zero_infinity=True
        )
        if step % _READ_EVERY:
            return found, {}
        whole = 0
        words = iter(batch.words.tolist())
        for row, length, count in zip(logits.argmax(-1).T.cpu(), lengths, batch.counts, strict=True):
            said = torch.unique_consecutive(row[:length])
            whole += said[said != vocabulary].tolist() == list(islice(words, count))
        return found, {"whole right": torch.tensor(whole / len(lengths))}

    encoder, dictations = audio_encoder(model), Dictations(model_dir, size)
    return Part("dictation", [encoder], dictations, loss, own=blank, matrices=inside(encoder.layers)[0])


# spoken questions


@dataclass(frozen=True)
class SpokenAnswers:
    """Sequences whose questions are spoken, or, without `said`, written."""

    answers: see.Answers
    said: Recordings | None


class SpokenSequences(see.Sequences):
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


def placeholder(length: int) -> str:
    """What stands in a prompt for a recording of so many spectra."""
    return f"<|audio_start|>{'<|audio_pad|>' * rows_of(length)}<|audio_end|>"


def hearing_part(model: Any, model_dir: Path, *, size: int = 24, questions: int = 4) -> Part:
    """Trains everything that listens, looks and answers, but the embeddings."""
    text = see.read_as_drawn(model)

    def loss(batch: SpokenAnswers, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = None if batch.said is None else heard(model, spectra(batch.said), batch.said.lengths)
        return see.answer_loss(model, batch.answers, step, rows)

    modules = [vision(model), audio_encoder(model), text, model.thinker.lm_head]
    sequences = SpokenSequences(model_dir, size, see.KINDS, questions, seed=1)
    matrices, stacks = inside(audio_encoder(model).layers, text.layers)
    return Part(
        "hearing",
        modules,
        sequences.spoken,
        loss,
        rate=5e-4,
        slow=[vision(model)],
        matrices=matrices,
        stacks=stacks,
        matrix_rate=0.003,
    )
