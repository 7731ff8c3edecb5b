"""Teach the model to hear: the audio encoder alone to write down what is said, then all to answer spoken questions."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.data.answers import KINDS
from demo_model.data.prompts import rows_of
from demo_model.data.recordings import (
    HEARD_RATE,
    HOP,
    LOUDEST,
    WINDOW,
    Dictation,
    Dictations,
    Recordings,
    SpokenAnswers,
    SpokenSequences,
)
from demo_model.training.muon import inside
from demo_model.training.networks import audio_encoder, heard, language_model, vision
from demo_model.training.see import answer_loss, read_as_drawn
from demo_model.training.steps import Part

_READ_EVERY = 20
"""Steps after which it is counted how many recordings are written down without a fault."""


def spectra(given: Recordings) -> Tensor:
    """float32 [recordings, mel bins, spectra], as the library's processor gives them, and zero after each one's end."""
    device = given.samples.device
    samples = given.samples.float() / LOUDEST
    window = torch.hann_window(WINDOW, device=device)
    power = torch.stft(samples, WINDOW, HOP, window=window, center=False, return_complex=True).abs() ** 2
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

    bins = mel_filter_bank(1 + WINDOW // 2, 128, 0.0, HEARD_RATE / 2, HEARD_RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(bins).float()


# the audio encoder alone


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


def hearing_part(model: Any, model_dir: Path, *, size: int = 24, questions: int = 4) -> Part:
    """Trains everything that listens, looks and answers, but the embeddings."""
    text = read_as_drawn(model)

    def loss(batch: SpokenAnswers, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = None if batch.said is None else heard(model, spectra(batch.said), batch.said.lengths)
        return answer_loss(model, batch.answers, step, rows)

    modules = [vision(model), audio_encoder(model), text, model.thinker.lm_head]
    sequences = SpokenSequences(model_dir, size, KINDS, questions, seed=1)
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
