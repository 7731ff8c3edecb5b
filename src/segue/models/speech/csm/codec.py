"""The vocoder stage: the decoder of the library's Mimi over pieces of utterances.

B utterances, n frames of each, K codes per frame, t samples.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.shared.speech.pieces import Carry, CausalDecoder
from segue.models.shared.speech.seanet import Decoder, Kinds
from segue.models.shared.speech.vocoder import StreamingVocoder
from segue.models.speech.csm.library import MimiConv1d, MimiConvTranspose1d, MimiModel, MimiResnetBlock
from segue.models.speech.csm.loading import load_config, load_decoder

_KINDS = Kinds(MimiConv1d, MimiConvTranspose1d, MimiResnetBlock)


class CodecDecoder(CausalDecoder):
    """The library's network, taken piece by piece."""

    def __init__(self, codec: MimiModel) -> None:
        config = codec.config
        super().__init__(config.num_quantizers, config.codebook_size, next(codec.parameters()).device)
        self.library_codec = codec
        half: Any = codec.decoder
        if hasattr(half, "decoder_seanet"):
            upsample, transformer, seanet = half.upsample, half.decoder_transformer, half.decoder_seanet
        else:  # the flat module of older versions
            upsample, transformer, seanet = codec.upsample, codec.decoder_transformer, half
        self._half = Decoder(upsample, transformer, list(seanet.layers), config.sliding_window, _KINDS)

    def waves(self, codes_BKn: Tensor, first: Tensor, carry: Carry) -> Tensor:
        return self._half.waves(self.library_codec.quantizer.decode(codes_BKn), first, carry)


class Vocoder(StreamingVocoder):
    """The codec's decoder as a stage; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        codec = config.codec_config
        super().__init__(ctx, CodecDecoder(load_decoder(ctx, config)), codec.sampling_rate, codec.frame_rate)
