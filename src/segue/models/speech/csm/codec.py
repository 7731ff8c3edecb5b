"""Run the decoder of the library's Mimi over pieces of utterances, as the vocoder stage.

Every layer has a bounded left context and no look-ahead: attention `sliding_window` positions, the current one
included, a convolution its kernel, a transposed convolution the inputs that overlap an output. n frames give n times
as many samples as one, from the first frame on.

B utterances, n frames of each, K codes per frame, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.shared.speech.pieces import Carry, Past, Piece, Ring, window
from segue.models.shared.speech.seanet import Kinds, run
from segue.models.shared.speech.vocoder import StreamingVocoder
from segue.models.speech.csm.library import MimiConv1d, MimiConvTranspose1d, MimiModel, MimiResnetBlock
from segue.models.speech.csm.loading import load_config, load_decoder

_KINDS = Kinds(MimiConv1d, MimiConvTranspose1d, MimiResnetBlock)


class CodecDecoder:
    """The library's network, taken piece by piece: `PieceDecoder`."""

    def __init__(self, codec: MimiModel) -> None:
        config = codec.config
        self.groups: int = config.num_quantizers
        self.codebook: int = config.codebook_size
        self.device = next(codec.parameters()).device
        self._window: int = config.sliding_window
        self.library_codec = codec
        self._quantizer = codec.quantizer
        half: Any = codec.decoder
        if hasattr(half, "decoder_seanet"):
            self._upsample, self._transformer, seanet = half.upsample, half.decoder_transformer, half.decoder_seanet
        else:  # the flat module of older versions
            self._upsample, self._transformer, seanet = codec.upsample, codec.decoder_transformer, half
        self._layers = list(seanet.layers)
        upsampled = 1 if self._upsample is None else self._upsample.conv.stride[0]
        self._rate: int = upsampled  # positions of the transformer per frame

    @torch.inference_mode()
    def decode(self, pieces: Sequence[Piece]) -> list[tuple[Tensor, Past | None]]:
        """Pieces of equal length, all of them the first of their utterance or none: (samples [t] on the CPU, the
        utterance's new past) of each."""
        carry = Carry(pieces)
        codes_BKn = torch.stack([piece.codes for piece in pieces]).to(self.device)
        first = torch.tensor([piece.first for piece in pieces], device=self.device)
        x = self._quantizer.decode(codes_BKn)
        if self._upsample is not None:
            x = run(self._upsample, x, carry, _KINDS)
        positions, mask = window(first * self._rate, x.shape[-1], self._window)
        x = self._transformer(
            x.transpose(1, 2),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=Ring(carry, self._window - 1),
            use_cache=False,
        ).last_hidden_state.transpose(1, 2)
        for layer in self._layers:
            x = run(layer, x, carry, _KINDS)
        waves = x[:, 0].float().cpu()
        return [(wave.clone(), past) for wave, past in zip(waves, carry.pasts(), strict=True)]


class Vocoder(StreamingVocoder):
    """The codec's decoder as a stage; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        codec = config.codec_config
        super().__init__(ctx, CodecDecoder(load_decoder(ctx, config)), codec.sampling_rate, codec.frame_rate)
