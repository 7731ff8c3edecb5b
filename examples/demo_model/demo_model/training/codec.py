"""Learn the codes of speech, and the model's own vocoder to give sound from them.

An encoder, for training only, takes a frame's mel spectra in the directions in which they differ most (principal
components); a residual quantiser (as in SoundStream, Zeghidour et al. 2021, section 3.3) tells them in codes. Its
codebooks are the rows of the vocoder's embedding: a frame is the sum of one row of each group, as the vocoder takes it
(its input is their mean). The vocoder then learns by spectra at several resolutions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demo_model.data.sayings import FRAME, SPEAKERS, SPOKEN_RATE, answer, clips, loudness, spoken
from demo_model.training.steps import Part

LOST = 555
"""Samples that the vocoder gives less than that, in all."""
_HOP = FRAME // 4
_WINDOWS = {256: 40, 512: 60, 1024: 80, 2048: 120}
"""Samples of a spectrum, and its mel bins."""
_FLOOR = 1e-5
"""Of a mel spectrum, times the window's samples: what is softer, 50 dB below the loudest, hardly counts; else most of
the loss is how silent silence is."""
_LOGS = 2.0
"""Part of the loss that logarithms of spectra are, beside their magnitudes."""
DIMS = 48
"""Numbers that the encoder gives of a frame. The vocoder's width takes them repeatedly."""
_BINS, _SOFT = 80, 1e-2
"""Mel bins of a spectrum of the encoder, and what is added before the logarithm: what is softer counts little."""
_ROUNDS = 20
"""Of k-means."""


class Encoder(nn.Module):
    """Sound → one vector per frame: its four mel spectra in the directions in which those of speech differ most."""

    def __init__(self, config: Any) -> None:
        """`config`: the vocoder's."""
        super().__init__()
        self.width: int = config.hidden_size
        bins = _BINS * FRAME // _HOP
        self.register_buffer("mean", torch.zeros(bins))
        self.register_buffer("directions", torch.zeros(DIMS, bins))
        self.register_buffer("spread", torch.ones(DIMS))
        self.register_buffer("mel", _mel_filters(_BINS, 1024), persistent=False)
        self.register_buffer("window", torch.hann_window(1024), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """[B, frames · FRAME] → [B, frames, DIMS]."""
        return (self.spectra(samples) - self.mean) @ self.directions.T

    def spectra(self, samples: Tensor) -> Tensor:
        """[B, frames · FRAME] → [B, frames, 4 · bins], logarithms."""
        made = torch.stft(samples, 1024, _HOP, window=self.window, return_complex=True).abs()[..., :-1]
        return (self.mel @ made + _SOFT).log().transpose(1, 2).unflatten(1, (-1, FRAME // _HOP)).flatten(2)


def nearest(rows: Tensor, book: Tensor) -> Tensor:
    """[n, dims], [codes, dims] → int64 [n]: which row of the book each one is closest to."""
    return torch.cdist(rows, book, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)


class Codec(nn.Module):
    """Encoder, quantiser and vocoder."""

    def __init__(self, code2wav: Any, encoder: Encoder) -> None:
        super().__init__()
        self.code2wav, self.encoder = code2wav, encoder

    def codebooks(self) -> Tensor:
        """[groups, codes, DIMS]. The vocoder takes the mean of a frame's rows, so that they count for a part each, and
        each direction as large as the others: most of the variance is loudness alone."""
        groups = self.code2wav.config.num_quantizers
        rows = self.code2wav.code_embedding.weight.view(groups, -1, self.encoder.width)[..., :DIMS]
        return rows / groups * self.encoder.spread

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        """[B, frames · FRAME] → codes [B, frames, groups]."""
        rows = self.encoder(samples)
        left, codes = rows.flatten(0, 1), []
        for book in self.codebooks():
            codes.append(nearest(left, book))
            left = left - book[codes[-1]]
        return torch.stack(codes, -1).unflatten(0, rows.shape[:2])

    def told(self, codes: Tensor) -> Tensor:
        """[B, frames, groups] → [B, frames, DIMS]: what codes tell of the encoder's vectors."""
        return torch.stack([book[codes[..., group]] for group, book in enumerate(self.codebooks())]).sum(0)

    def decode(self, rows: Tensor) -> Tensor:
        """[B, frames, DIMS] → [B, frames · FRAME − LOST]: the vocoder after its embedding."""
        rows = (rows / self.encoder.spread).repeat(1, 1, self.encoder.width // DIMS)
        hidden = self.code2wav.pre_transformer(inputs_embeds=rows).last_hidden_state.transpose(1, 2)
        for block in [*(one for both in self.code2wav.upsample for one in both), *self.code2wav.decoder]:
            hidden = block(hidden)
        return hidden[:, 0]

    @torch.no_grad()
    def learn(self, samples: Sequence[Tensor]) -> dict[str, float]:
        """Find directions and codebooks for sentences, int16 [samples] each; of each group, the part of the vectors'
        variance that it and those before it do not tell."""
        encoder, config = self.encoder, self.code2wav.config
        spectra = torch.cat([encoder.spectra(loudness(one)[None])[0] for one in samples])
        encoder.mean.copy_(spectra.mean(0))
        spread, directions = torch.linalg.eigh((spectra - encoder.mean).T.cov())
        best = directions[:, -DIMS:].T
        rows = (spectra - encoder.mean) @ best.T
        encoder.directions.copy_(best / rows.std())
        left, found = rows / rows.std(), []
        encoder.spread.copy_(left.std(0))
        values = {"in these directions": float(spread[-DIMS:].sum() / spread.sum())}
        for group in range(config.num_quantizers):
            found.append(_means(left, config.codebook_size))
            left = left - found[-1][nearest(left, found[-1])]
            values[f"left {group}"] = float(left.square().mean())
        repeats = encoder.width // DIMS
        weight = len(found) * (torch.stack(found) / encoder.spread).repeat(1, 1, repeats).flatten(0, 1)
        self.code2wav.code_embedding.weight.copy_(weight)
        return values


def _means(rows: Tensor, count: int) -> Tensor:
    """[n, dims] → [count, dims]: k-means (Lloyd 1982); one that nothing is nearest to begins anew."""
    generator = torch.Generator().manual_seed(0)
    means = rows[torch.randperm(len(rows), generator=generator)[torch.arange(count) % len(rows)]]
    for _ in range(_ROUNDS):
        taken = nearest(rows, means)
        sums = torch.zeros_like(means).index_add_(0, taken, rows)
        counts = taken.bincount(minlength=count)[:, None]
        anew = rows[torch.randint(len(rows), (count,), generator=generator)]
        means = torch.where(counts > 0, sums / counts.clamp(min=1), anew)
    return means


def spectral_distance(made: Tensor, wanted: Tensor) -> Tensor:
    """[B, n] each → difference of their spectra: magnitudes, and logarithms of mel spectra, over several windows."""
    found = []
    for size, bins in _WINDOWS.items():
        window, mel = torch.hann_window(size, device=made.device), _mel_filters(bins, size, made.device)
        one, other = (
            torch.stft(sound, size, size // 4, window=window, return_complex=True).abs() for sound in (made, wanted)
        )
        floor = _FLOOR * size
        logs = ((mel @ one + floor).log() - (mel @ other + floor).log()).abs().mean()
        found.append((one - other).norm() / other.norm() + _LOGS * logs)
    return torch.stack(found).mean()


def codec_part(model: Any, *, size: int = 1000) -> Part:
    """Finds the codes of so many sentences, at once."""
    encoder = Encoder(model.config.code2wav_config)
    model.code2wav.code_embedding.requires_grad_(False)

    def learn() -> dict[str, float]:
        rng = random.Random("codec")
        said = [spoken(answer(rng), rng.choice(list(SPEAKERS))) for _ in range(size)]
        whole = [torch.from_numpy(np.pad(one, (FRAME, -len(one) % FRAME + FRAME))) for one in said]
        return Codec(model.code2wav, encoder).learn(whole)

    return Part("codec", [model.code2wav.code_embedding], own=encoder, once=learn)


def vocoder_part(model: Any, encoder: Encoder, *, size: int = 12) -> Part:
    """Trains the vocoder alone, for the codes that `codec` has learned, whose encoder is given: they stay what they
    are, and so does what the talker learns meanwhile."""
    codec = Codec(model.code2wav, encoder).to(model.device)
    model.code2wav.code_embedding.requires_grad_(False)

    def loss(batch: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        samples = loudness(batch)
        codes = codec.encode(samples)
        made = codec.decode(codec.told(codes)).float()
        with torch.autocast(samples.device.type, enabled=False):
            spectra = spectral_distance(made, samples[:, : made.shape[1]])
        return spectra, {"spectra": spectra}

    # neither the last layer, which all depends on, nor layers of one input per output
    matrices = [
        one
        for name, one in model.code2wav.named_parameters()
        if one.ndim > 1 and not name.startswith(("code_embedding", f"decoder.{len(model.code2wav.decoder) - 1}"))
        if "dwconv" not in name
    ]
    modules = [model.code2wav]
    return Part("vocoder", modules, partial(clips, size=size), loss, rate=3e-4, matrices=matrices)


@cache
def _mel_filters(bins: int, window: int, device: torch.device | None = None) -> Tensor:
    """[bins, window // 2 + 1]"""
    from transformers.audio_utils import mel_filter_bank

    made = mel_filter_bank(window // 2 + 1, bins, 0.0, 12000.0, SPOKEN_RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(made.T).float().to(device)
