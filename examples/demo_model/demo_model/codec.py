"""Learn the codes of speech: an encoder and a residual quantiser, for training only, before the model's own vocoder.

The quantiser's codebooks are the rows of the vocoder's embedding: what the encoder says of a frame is the sum of one
row of each group, as the vocoder takes it (its input is their mean). Residual quantisation as in SoundStream (Zeghidour
et al. 2021, section 3.3): rows are running means of what takes them, and learn without a gradient. Encoder and vocoder
learn alone first, by spectra at several resolutions.
"""

from __future__ import annotations

import random
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.questions import JSON
from demo_model.see import KINDS, asked
from demo_model.speech import Manner, resampled, say
from demo_model.training import Part

SPOKEN_RATE = 24000
FRAME = 1920
"""Samples of one row of codes."""
LOST = 555
"""Samples that the vocoder gives less than that, in all."""
SPEAKERS = {"chelsie": Manner("en-us+f2", 145, 55), "ethan": Manner("en-us", 140, 45)}
"""The model's voices, and how espeak-ng says what they say."""
_LOUDEST = 32767
_HOP = FRAME // 4
_FRAMES = 20
"""Of a clip to train on."""
_WINDOWS = {256: 40, 512: 60, 1024: 80, 2048: 120}
"""Samples of a spectrum, and its mel bins."""
_FLOOR = 5e-4
"""Of a mel spectrum: what is softer, about 80 dB below the loudest, counts as silence."""
_LOGS, _COMMITMENT = 2.0, 1.0
"""Parts of the loss, beside the spectra's magnitudes."""
DIMS = 24
"""Numbers that the encoder gives of a frame; 64 bits cannot tell many. The vocoder's width takes them repeatedly."""
_ALONE = 200
"""Steps before there are codes."""
_DECAY = 0.99
"""Of a codebook's running means."""
_IDLE = 0.03
"""Of the mean use of a codebook's rows: a row that is used less begins anew."""


@lru_cache(4000)
def spoken(text: str, speaker: str) -> np.ndarray:
    """int16 [samples] at `SPOKEN_RATE`, the loudest 32767: a sentence as the model is to say it."""
    made = resampled(say(text, SPEAKERS[speaker]), SPOKEN_RATE)
    return np.clip(np.round(made * _LOUDEST), -_LOUDEST, _LOUDEST).astype(np.int16)


def loudness(samples: Tensor) -> Tensor:
    """int16 → float32 between -1 and 1."""
    return samples.float() / _LOUDEST


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


class _Norm(nn.LayerNorm):
    """Of each position's channels, [B, channels, positions]: how many frames follow does not change one."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.transpose(1, 2)).transpose(1, 2)


class Encoder(nn.Module):
    """Sound → one vector per frame: a spectrum of 50 Hz, and convolutions of which two halve the rate."""

    def __init__(self, config: Any, bins: int = 80) -> None:
        """`config`: the vocoder's."""
        super().__init__()
        self.width = width = config.hidden_size
        self.register_buffer("taken", torch.zeros(config.num_quantizers, config.codebook_size))
        self.register_buffer("mel", _mel_filters(bins, 1024), persistent=False)
        self.register_buffer("window", torch.hann_window(1024), persistent=False)
        self.enter = nn.Conv1d(bins, width, 5, padding=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _Norm(width),
                nn.Conv1d(width, 2 * width, 3, padding=1),
                nn.GELU(),
                nn.Conv1d(2 * width, width, 1),
            )
            for _ in range(4)
        )
        self.halve = nn.ModuleList(nn.Conv1d(width, width, 4, stride=2, padding=1) for _ in range(2))
        self.leave = nn.Sequential(_Norm(width), nn.Conv1d(width, DIMS, 1), _Norm(DIMS, elementwise_affine=False))

    def forward(self, samples: Tensor) -> Tensor:
        """[B, frames · FRAME] → [B, frames, DIMS]."""
        rows = self.enter(self.spectrum(samples))
        for index, block in enumerate(self.blocks):
            rows = rows + block(rows)
            if index % 2:
                rows = self.halve[index // 2](rows)
        return self.leave(rows).transpose(1, 2).float()

    def spectrum(self, samples: Tensor) -> Tensor:
        """[B, n] → log mel spectrum [B, bins, n // hop], about -1.4 where nothing is heard, to 2."""
        made = torch.stft(samples, 1024, _HOP, window=self.window, return_complex=True).abs()[..., :-1]
        with torch.autocast(samples.device.type, enabled=False):
            return ((self.mel @ made + 1e-4).log() + 5.0) / 3.0


def nearest(rows: Tensor, book: Tensor) -> Tensor:
    """[n, dims], [codes, dims] → int64 [n]: which row of the book each one is closest to."""
    return torch.cdist(rows, book, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)


class Codec(nn.Module):
    """Encoder, quantiser and vocoder."""

    def __init__(self, code2wav: Any, encoder: Encoder) -> None:
        super().__init__()
        self.code2wav, self.encoder = code2wav, encoder

    def codebooks(self) -> Tensor:
        """[groups, codes, DIMS]; the vocoder takes the mean of a frame's rows, so that they count for a part each."""
        groups = self.code2wav.config.num_quantizers
        return self.code2wav.code_embedding.weight.view(groups, -1, self.encoder.width)[..., :DIMS] / groups

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        """[B, frames · FRAME] → codes [B, frames, groups]."""
        rows = self.encoder(samples)
        left, codes = rows.flatten(0, 1), []
        for book in self.codebooks():
            codes.append(nearest(left, book))
            left = left - book[codes[-1]]
        return torch.stack(codes, -1).unflatten(0, rows.shape[:2])

    def decode(self, rows: Tensor) -> Tensor:
        """[B, frames, DIMS] → [B, frames · FRAME − LOST]: the vocoder after its embedding."""
        rows = rows.repeat(1, 1, self.encoder.width // DIMS)
        hidden = self.code2wav.pre_transformer(inputs_embeds=rows).last_hidden_state.transpose(1, 2)
        for block in [*(one for both in self.code2wav.upsample for one in both), *self.code2wav.decoder]:
            hidden = block(hidden)
        return hidden[:, 0]

    def loss(self, batch: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Of int16 [B, samples]: how far the vocoder's sound is from them, and codes from what the encoder gives."""
        samples = loudness(batch)
        rows = self.encoder(samples)
        told, commitment, values = rows, rows.new_zeros(()), {}
        if step >= _ALONE:
            with torch.autocast(rows.device.type, enabled=False):
                known, values = self.learn(rows.detach().flatten(0, 1), step - _ALONE)
            known = known.view_as(rows)
            commitment = functional.mse_loss(rows, known)
            told = rows + (known - rows).detach()
        made = self.decode(told).float()
        with torch.autocast(rows.device.type, enabled=False):
            spectra = spectral_distance(made, samples[:, : made.shape[1]])
        return spectra + _COMMITMENT * commitment, {"spectra": spectra, **values}

    @torch.no_grad()
    def learn(self, rows: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """[n, DIMS] → the sum of each one's codes, and what to log: of each group, the part of the rows' variance that
        it and those before it do not tell, and the part of its rows that are in use.

        Moves the codebooks, whose first step is 0: each row to the mean of what takes it; an idle one, as all are at
        first, to what the groups before leave of some frame.
        """
        decay = min(_DECAY, (1 + step) / (10 + step))
        books, left, values = self.codebooks(), rows, {}
        spread = rows.var(0, correction=0).mean()
        for group, (book, taken) in enumerate(zip(books, self.encoder.taken, strict=True)):
            mean = len(rows) / len(book)
            idle = taken < _IDLE * mean
            anew = left[torch.randint(len(rows), taken.shape, device=rows.device)]
            book.copy_(torch.where(idle[:, None], anew, book))
            taken.masked_fill_(idle, mean)
            codes = nearest(left, book)
            takes = functional.one_hot(codes, len(book)).to(rows.dtype).T
            told = book[codes]
            taken.mul_(decay).add_(takes.sum(1), alpha=1 - decay)
            book += (1 - decay) / taken[:, None].clamp(min=1e-6) * (takes @ (left - told))
            left = left - told
            values[f"left {group}"] = left.square().mean() / spread
            values[f"used {group}"] = (taken > 0.1 * mean).float().mean()
        repeats = self.encoder.width // DIMS
        self.code2wav.code_embedding.weight.copy_(len(books) * books.repeat(1, 1, repeats).flatten(0, 1))
        return rows - left, values


def spectral_distance(made: Tensor, wanted: Tensor) -> Tensor:
    """[B, n] each → difference of their spectra: magnitudes, and logarithms of mel spectra, over several windows."""
    found = []
    for size, bins in _WINDOWS.items():
        window, mel = torch.hann_window(size, device=made.device), _mel_filters(bins, size, made.device)
        one, other = (
            torch.stft(sound, size, size // 4, window=window, return_complex=True).abs() for sound in (made, wanted)
        )
        logs = ((mel @ one + _FLOOR).log() - (mel @ other + _FLOOR).log()).abs().mean()
        found.append((one - other).norm() / other.norm() + _LOGS * logs)
    return torch.stack(found).mean()


def codec_part(model: Any, *, size: int = 12) -> Part:
    """Trains the vocoder with an encoder of its own."""
    encoder = Encoder(model.config.code2wav_config)
    codec = Codec(model.code2wav, encoder).to(model.device)
    model.code2wav.code_embedding.requires_grad_(False)  # the codebooks follow their own rule
    return Part("codec", [model.code2wav], partial(clips, size=size), codec.loss, own=encoder, rate=1.5e-4)


@cache
def _mel_filters(bins: int, window: int, device: torch.device | None = None) -> Tensor:
    """[bins, window // 2 + 1]"""
    from transformers.audio_utils import mel_filter_bank

    made = mel_filter_bank(window // 2 + 1, bins, 0.0, 12000.0, SPOKEN_RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(made.T).float().to(device)
