"""The vocoder stage of Qwen3-TTS: the decoder of its speech tokenizer, taken piece by piece. n frames of 80 ms give
1920 n samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.shared.speech.code2wav import attend, run
from segue.models.shared.speech.pieces import Carry, Past, Piece
from segue.models.shared.speech.vocoder import StreamingVocoder
from segue.models.speech.qwen3_tts.config import VocoderDecoder, read_vocoder
from segue.models.speech.qwen3_tts.loading import load_vocoder
from segue.models.speech.qwen3_tts.networks import CodesToWave


class CodeDecoder:
    """`PieceDecoder` over the network."""

    def __init__(self, net: CodesToWave, config: VocoderDecoder) -> None:
        net.pre_transformer.set_attn_implementation("sdpa")
        self.net = net
        self.groups: int = config.num_quantizers
        self.codebook: int = config.codebook_size
        self._window: int = config.sliding_window
        self._device = net.pre_conv.conv.weight.device

    @torch.inference_mode()
    def decode(self, pieces: Sequence[Piece]) -> list[tuple[Tensor, Past | None]]:
        """Pieces of equal length, all of them the first of their utterance or none: (samples [t] in [-1, 1] on the CPU,
        the utterance's new past) of each."""
        carry = Carry(pieces)
        net, transformer = self.net, self.net.pre_transformer
        codes_BKn = torch.stack([piece.codes for piece in pieces]).to(self._device)
        first = torch.tensor([piece.first for piece in pieces], device=self._device)
        x_BnC = run(net.pre_conv, net.embed(codes_BKn), carry).transpose(1, 2)
        x_BnC = attend(transformer, transformer.input_proj(x_BnC), first, self._window, carry)
        x = run(net.upsample, transformer.output_proj(x_BnC).transpose(1, 2), carry)
        waves = run(net.decoder, x, carry).clamp(min=-1, max=1)[:, 0].float().cpu()
        return [(wave.clone(), past) for wave, past in zip(waves, carry.pasts(), strict=True)]


class Vocoder(StreamingVocoder):
    """Gives samples in [-1, 1]; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        config = read_vocoder(ctx.model_dir)
        decoder = CodeDecoder(load_vocoder(ctx, config), config.decoder_config)
        super().__init__(ctx, decoder, config.output_sample_rate)
