"""The vocoder stage: the decoder of the audio tokenizer over pieces of utterances.

The network is Mimi's with continuous latents in place of codes. As in the library's processor, the first samples of an
utterance are faded in.

B utterances, n frames of each, D numbers of a latent, t samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.shared.checkpoint.files import read_object
from segue.models.shared.speech.pieces import Carry, CausalDecoder, CodePiece, Past
from segue.models.shared.speech.seanet import Decoder, Kinds
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


class LatentDecoder(CausalDecoder):
    """The library's network, taken piece by piece."""

    def __init__(self, codec: PocketTTSAudioTokenizerModel, mean: Tensor, std: Tensor, fade_in: float) -> None:
        """`mean`, `std` [D]: of the latents, which arrive normalised; `fade_in`: in seconds."""
        config, half = codec.config, codec.decoder
        super().__init__(config.latent_dim, None, next(codec.parameters()).device)
        self._codec = codec
        layers = list(half.decoder_seanet.layers)
        self._half = Decoder(half.upsample, half.decoder_transformer, layers, config.sliding_window, _KINDS)
        self._mean, self._std = mean.to(self.device), std.to(self.device)
        self._fade = torch.linspace(0, 1, int(fade_in * config.sampling_rate))

    def waves(self, codes_BKn: Tensor, first: Tensor, carry: Carry) -> Tensor:
        latents_BDn = self._codec.latent_proj(codes_BKn * self._std[:, None] + self._mean[:, None])
        return self._half.waves(latents_BDn, first, carry)

    @torch.inference_mode()
    def decode(self, pieces: Sequence[CodePiece]) -> list[tuple[Tensor, Past | None]]:
        decoded = super().decode(pieces)
        for piece, (wave, _) in zip(pieces, decoded, strict=True):
            if piece.first == 0:
                count = min(len(self._fade), len(wave))
                wave[:count] *= self._fade[:count]
        return decoded


class Vocoder(StreamingVocoder):
    """The audio tokenizer's decoder as a stage; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        codec = load_codec_config(ctx.model_dir, config)
        path = ctx.model_dir / "processor_config.json"
        fade_in = (read_object(path) if path.is_file() else {}).get("fade_in_duration", _FADE_IN)
        decoder = LatentDecoder(load_decoder(ctx, codec), *latent_statistics(ctx, config), fade_in)
        super().__init__(ctx, decoder, codec.sampling_rate, codec.frame_rate)
