"""Teach the model to hear: the audio encoder alone to write down what is said, then all to answer spoken questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model import see
from demo_model.networks import audio_encoder, vision
from demo_model.questions import Question, about_clip, about_picture, without_picture
from demo_model.scenes import draw_clip, draw_scene
from demo_model.speech import RATE, VOICES, Manner, say
from demo_model.training import Part
from segue.media.audio import resample

HEARD_RATE = 16000
_CHUNK = 100
"""Spectra that the encoder takes at once; they give `_ROWS` rows."""
_ROWS = 13


def manner(rng: random.Random) -> Manner:
    """A random voice, speed and pitch."""
    return Manner(rng.choice(VOICES), rng.randint(120, 200), rng.randint(30, 70), rng.choice([0, 0, 0, 3]))


def sound(text: str, rng: random.Random) -> np.ndarray:
    """float32 [samples] at `HEARD_RATE`: a question said in a random manner, with noise and pauses around it."""
    said = resample(say(text, manner(rng)), RATE, HEARD_RATE)
    rest = [np.zeros(int(HEARD_RATE * rng.uniform(0.02, 0.3)), np.float32) for _ in range(2)]
    whole = np.concatenate([rest[0], said * rng.uniform(0.4, 1.5), rest[1]])
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 10 ** rng.uniform(-4, -2), len(whole))
    return (whole + noise).astype(np.float32)


@cache
def _extractor(model_dir: Path) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor.from_pretrained(model_dir)


def spectra(model_dir: Path, samples: np.ndarray) -> Tensor:
    """float32 [mel bins, spectra], as the library's processor gives them."""
    made = _extractor(model_dir)(
        samples, sampling_rate=HEARD_RATE, padding=True, return_attention_mask=True, return_tensors="pt"
    )
    found: Tensor = made["input_features"][0][:, made["attention_mask"][0].bool()]
    return found


def rows_of(count: int) -> int:
    """Rows that the encoder gives for so many spectra (the library's `_get_feat_extract_output_lengths`)."""
    left = count % _CHUNK
    for _ in range(3):
        left = (left - 1) // 2 + 1
    return left + count // _CHUNK * _ROWS


# the audio encoder alone


@dataclass(frozen=True)
class Dictation:
    """Recordings and the tokens of their words. `mels`: float32 [bins, all spectra]; `lengths`: spectra of each."""

    mels: Tensor
    lengths: Tensor
    words: Tensor
    counts: Tensor


class Dictations:
    """Makes batches of `Dictation`."""

    def __init__(self, model_dir: Path, size: int) -> None:
        self._dir, self._size = model_dir, size

    def __call__(self, step: int) -> Dictation:
        rng = random.Random(f"dictation/{step}")
        texts = [question(rng).text for _ in range(self._size)]
        mels = [spectra(self._dir, sound(text, rng)) for text in texts]
        words = [see.encode(self._dir, text) for text in texts]
        return Dictation(
            torch.cat(mels, 1),
            torch.tensor([mel.shape[1] for mel in mels]),
            torch.cat(words),
            torch.tensor([len(one) for one in words]),
        )


def question(rng: random.Random) -> Question:
    """A random question of any kind."""
    kind = rng.random()
    if kind < 0.5:
        return about_picture(draw_scene(rng), rng, "full", 1)[0]
    return about_clip(draw_clip(rng), rng, "full", 1)[0] if kind < 0.65 else without_picture(rng, "full", 1)[0]


def dictation_part(model: Any, model_dir: Path) -> Part:
    """Trains the audio encoder by CTC (Graves et al. 2006) over the tokenizer's tokens; the last of its outputs is the
    blank."""
    config = model.config.thinker_config
    vocabulary: int = config.text_config.vocab_size
    head = nn.Linear(config.audio_config.output_dim, vocabulary + 1)

    def loss(batch: Dictation, step: int) -> tuple[Tensor, dict[str, float]]:
        rows = audio_encoder(model)(batch.mels, feature_lens=batch.lengths).last_hidden_state
        lengths = [rows_of(int(length)) for length in batch.lengths]
        logits = nn.utils.rnn.pad_sequence(list(head(rows).log_softmax(-1).split(lengths)))
        found = functional.ctc_loss(
            logits, batch.words, torch.tensor(lengths), batch.counts, blank=vocabulary, zero_infinity=True
        )
        best = logits.argmax(-1).T
        said = [torch.unique_consecutive(row[:length]) for row, length in zip(best, lengths, strict=True)]
        whole = [
            (row[row != vocabulary]).tolist() == words.tolist()
            for row, words in zip(said, batch.words.split(batch.counts.tolist()), strict=True)
        ]
        return found, {"whole_right": sum(whole) / len(whole)}

    return Part("dictation", [audio_encoder(model), head], Dictations(model_dir, 32), loss)


# spoken questions


class SpokenSequences(see.Sequences):
    """As `Sequences`, with every second batch's questions spoken."""

    def __call__(self, step: int) -> see.Answers:
        if step % 2:
            return super().__call__(step // 2)
        rng = random.Random(f"spoken/{self.seed}/{step}")
        kind = self.kinds[step // 2 % len(self.kinds)]
        made = [see.asked(kind, rng, self.questions) for _ in range(self.size)]
        mels = [[spectra(self.model_dir, sound(one.text, rng)) for one in questions] for _, _, questions in made]
        texts = [[_placeholder(mel) for mel in one] for one in mels]
        batch = self.batch(
            kind,
            [
                (pixels, style, _said(questions, heard))
                for (pixels, style, questions), heard in zip(made, texts, strict=True)
            ],
        )
        flat = [mel for one in mels for mel in one]
        return replace(batch, mels=torch.cat(flat, 1), lengths=torch.tensor([mel.shape[1] for mel in flat]))


def _placeholder(mel: Tensor) -> str:
    return f"<|audio_start|>{'<|audio_pad|>' * rows_of(mel.shape[1])}<|audio_end|>"


def _said(questions: Sequence[Question], heard: Sequence[str]) -> list[Question]:
    return [replace(one, text=text) for one, text in zip(questions, heard, strict=True)]


def hearing_part(model: Any, model_dir: Path, *, size: int = 24, questions: int = 4) -> Part:
    """Trains everything that listens, looks and answers."""
    thinker = model.thinker
    modules = [vision(model), audio_encoder(model), thinker.model, thinker.lm_head]
    sequences = SpokenSequences(model_dir, size, see.KINDS, questions, seed=1)
    return Part("hearing", modules, sequences, lambda batch, step: see.answer_loss(model, batch), rate=5e-4)
