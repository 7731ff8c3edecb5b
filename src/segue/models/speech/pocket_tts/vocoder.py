"""Run the decoder of the audio tokenizer over pieces of utterances, as the vocoder stage.

The network is Mimi's with continuous latents in place of codes. n frames give n times as many samples as one, from the
first frame on. As in the library's processor, the first samples of an utterance are faded in.

B utterances, n frames of each, D numbers of a latent, t samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.shared.checkpoint.files import read_object
from segue.models.shared.speech.pieces import Carry, Past, Piece, Ring, window
from segue.models.shared.speech.seanet import Kinds, run
from segue.models.shared.speech.vocoder import StreamingVocoder
from segue.models.speech.pocket_tts.library import (
    PocketTTSAudioTokenizerConv1d,
    PocketTTSAudioTokenizerConvTranspose1d,
    PocketTTSAudioTokenizerModel,
    PocketTTSAudioTokenizerResnetBlock,
)
from segue.models.speech.pocket_tts.loading import latent_statistics, load_codec_config, load_config, load_decoder

_KINDS = Kinds(
    PocketTTSAudioTokenizerConv1d, PocketTTSAudioTokenizerConvTranspose1d, PocketTTSAudioTokenizerResnetBlock
)
_FADE_IN = 0.005
"""Seconds, the library's default of `fade_in_duration`."""


class LatentDecoder:
    """The library's network, taken piece by piece: `PieceDecoder`."""

    codebook = None

    def __init__(self, codec: PocketTTSAudioTokenizerModel, mean: Tensor, std: Tensor, fade_in: float) -> None:
        """`mean`, `std` [D]: of the latents, which arrive normalised; `fade_in`: in seconds."""
        config = codec.config
        self.groups: int = config.latent_dim
        self.device = next(codec.parameters()).device
        self._codec, self._half = codec, codec.decoder
        self._mean, self._std = mean.to(self.device), std.to(self.device)
        self._window: int = config.sliding_window
        self._fade = torch.linspace(0, 1, int(fade_in * config.sampling_rate))

    @torch.inference_mode()
    def decode(self, pieces: Sequence[Piece]) -> list[tuple[Tensor, Past | None]]:
        """Pieces of equal length, all of them the first of their utterance or none: (samples [t] on the CPU, the
        utterance's new past) of each."""
        carry = Carry(pieces)
        latents_BDn = torch.stack([piece.codes for piece in pieces]).to(self.device)
        first = torch.tensor([piece.first for piece in pieces], device=self.device)
        x = self._codec.latent_proj(latents_BDn * self._std[:, None] + self._mean[:, None])
        x = run(self._half.upsample, x, carry, _KINDS)
        rate = x.shape[-1] // latents_BDn.shape[-1]
        positions, mask = window(first * rate, x.shape[-1], self._window)
        x = self._half.decoder_transformer(
            x.transpose(1, 2),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=Ring(carry, self._window - 1),
            use_cache=False,
        ).last_hidden_state.transpose(1, 2)
        for layer in self._half.decoder_seanet.layers:
            x = run(layer, x, carry, _KINDS)
        waves = [wave.clone() for wave in x[:, 0].float().cpu()]
        for piece, wave in zip(pieces, waves, strict=True):
            if piece.first == 0:
                count = min(len(self._fade), len(wave))
                wave[:count] *= self._fade[:count]
        return list(zip(waves, carry.pasts(), strict=True))


class Vocoder(StreamingVocoder):
    """The audio tokenizer's decoder as a stage; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        codec = load_codec_config(ctx.model_dir, config)
        path = ctx.model_dir / "processor_config.json"
        fade_in = (read_object(path) if path.is_file() else {}).get("fade_in_duration", _FADE_IN)
        decoder = LatentDecoder(load_decoder(ctx, codec), *latent_statistics(ctx, config), fade_in)
        super().__init__(ctx, decoder, codec.sampling_rate, codec.frame_rate)
