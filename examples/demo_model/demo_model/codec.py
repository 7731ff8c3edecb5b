"""Learn the codes of speech: an encoder and a residual quantiser, for training only, before the model's own vocoder.

The quantiser's codebooks are the rows of the vocoder's embedding: what the encoder says of a frame is the sum of one
row of each group, as the vocoder takes it (its input is their mean). Residual quantisation as in SoundStream (Zeghidour
et al. 2021, section 3.3); the losses compare spectra at several resolutions.
"""

from __future__ import annotations

import random
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.questions import STYLES
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
_WINDOWS = (256, 512, 1024, 2048)
_COMMITMENT = 0.25
_RESTART = 100
"""Steps after which rows that no frame takes are set to what some frame lacks."""


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
        if style != list(STYLES)[-1]:
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

    def __init__(self, width: int, bins: int = 80) -> None:
        super().__init__()
        self.register_buffer("mel", _mel_filters(bins), persistent=False)
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
        self.leave = nn.Conv1d(width, width, 1)

    def forward(self, samples: Tensor) -> Tensor:
        """[B, frames · FRAME] → [B, frames, width]."""
        rows = self.enter(self.spectrum(samples))
        for index, block in enumerate(self.blocks):
            rows = rows + block(rows)
            if index % 2:
                rows = self.halve[index // 2](rows)
        return self.leave(rows).transpose(1, 2)

    def spectrum(self, samples: Tensor) -> Tensor:
        """[B, n] → log mel spectrum [B, bins, n // hop]."""
        made = torch.stft(samples, 1024, _HOP, window=self.window, return_complex=True).abs()[..., :-1]
        return (self.mel @ made + 1e-4).log()


def quantized(rows: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, width], [groups, codes, width] → codes [B, T, groups], their sum [B, T, width], and the loss that draws
    each chosen row to what it stands for."""
    left, codes, loss = rows, [], rows.new_zeros(())
    for book in codebooks:
        far = torch.cdist(left.detach().flatten(0, 1), book.detach(), compute_mode="donot_use_mm_for_euclid_dist")
        best = far.argmin(-1).view(left.shape[:2])
        chosen = book[best]
        loss = loss + functional.mse_loss(chosen, left.detach())
        left = left - chosen.detach()
        codes.append(best)
    return torch.stack(codes, -1), rows - left, loss


class Codec(nn.Module):
    """Encoder, quantiser and vocoder."""

    def __init__(self, code2wav: Any, encoder: Encoder) -> None:
        super().__init__()
        self.code2wav, self.encoder = code2wav, encoder
        taken = torch.zeros(code2wav.config.num_quantizers, code2wav.config.codebook_size)
        self.register_buffer("taken", taken, persistent=False)

    def codebooks(self) -> Tensor:
        """[groups, codes, width]; the vocoder takes the mean of a frame's rows, so that they count for a part each."""
        groups = self.code2wav.config.num_quantizers
        return self.code2wav.code_embedding.weight.view(groups, -1, self.code2wav.config.hidden_size) / groups

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        """[B, frames · FRAME] → codes [B, frames, groups]."""
        return quantized(self.encoder(samples), self.codebooks())[0]

    def decode(self, rows: Tensor) -> Tensor:
        """[B, frames, width] → [B, frames · FRAME − LOST]: the vocoder after its embedding."""
        hidden = self.code2wav.pre_transformer(inputs_embeds=rows).last_hidden_state.transpose(1, 2)
        for block in [*(one for both in self.code2wav.upsample for one in both), *self.code2wav.decoder]:
            hidden = block(hidden)
        return hidden[:, 0]

    def loss(self, batch: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Of int16 [B, samples]: how far the vocoder's sound is from them, and codes from what the encoder gives."""
        samples = loudness(batch)
        rows = self.encoder(samples)
        codes, nearest, drawn = quantized(rows, self.codebooks())
        made = self.decode(rows + (nearest - rows).detach())
        spectra = spectral_distance(made, samples[:, : made.shape[1]])
        commitment = functional.mse_loss(rows, nearest.detach())
        self._restart(codes, rows.detach(), step)
        used = (self.taken > 0).float().mean()
        return spectra + drawn + _COMMITMENT * commitment, {"spectra": spectra, "codes used": used}

    @torch.no_grad()
    def _restart(self, codes: Tensor, rows: Tensor, step: int) -> None:
        for group in range(codes.shape[-1]):
            self.taken[group] += torch.bincount(codes[..., group].flatten(), minlength=self.taken.shape[1])
        if (step + 1) % _RESTART:
            return
        groups = len(self.taken)
        weights, left = self.code2wav.code_embedding.weight.view(groups, self.taken.shape[1], -1), rows.flatten(0, 1)
        for group, books in enumerate(self.codebooks()):
            idle = (self.taken[group] == 0).nonzero()[:, 0]
            weights[group, idle] = groups * left[torch.randint(len(left), (len(idle),), device=left.device)]
            left = left - books[codes[..., group].flatten()]
        self.taken.zero_()


def spectral_distance(made: Tensor, wanted: Tensor) -> Tensor:
    """[B, n] each → difference of their spectra, of magnitudes and of their logarithms, over several windows."""
    found = []
    for size in _WINDOWS:
        window = torch.hann_window(size, device=made.device)
        one, other = (
            torch.stft(sound, size, size // 4, window=window, return_complex=True).abs().clamp(min=1e-5)
            for sound in (made, wanted)
        )
        found.append((one - other).norm() / other.norm() + (one.log() - other.log()).abs().mean())
    return torch.stack(found).mean()


def codec_part(model: Any, *, size: int = 12) -> Part:
    """Trains the vocoder with an encoder of its own."""
    encoder = Encoder(model.config.code2wav_config.hidden_size)
    codec = Codec(model.code2wav, encoder).to(model.device)
    return Part("codec", [model.code2wav], partial(clips, size=size), codec.loss, own=encoder)


def _mel_filters(bins: int) -> Tensor:
    from transformers.audio_utils import mel_filter_bank

    made = mel_filter_bank(513, bins, 0.0, 12000.0, SPOKEN_RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(made.T).float()
