"""The vocoder stage of Qwen3-TTS: the decoder of its speech tokenizer, taken piece by piece. n frames of 80 ms give
1920 n samples."""

from __future__ import annotations

from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.shared.speech.code2wav import FRAME_RATE, attend, run, take_snakes
from segue.models.shared.speech.pieces import Carry, CausalDecoder
from segue.models.shared.speech.vocoder import StreamingVocoder
from segue.models.speech.qwen3_tts.config import VocoderDecoder, read_vocoder
from segue.models.speech.qwen3_tts.loading import load_vocoder
from segue.models.speech.qwen3_tts.networks import CodesToWave


class CodeDecoder(CausalDecoder):
    """The network, taken piece by piece."""

    def __init__(self, net: CodesToWave, config: VocoderDecoder) -> None:
        super().__init__(config.num_quantizers, config.codebook_size, net.pre_conv.conv.weight.device)
        net.pre_transformer.set_attn_implementation("sdpa")
        take_snakes(net)
        self.net = net
        self._window: int = config.sliding_window

    def waves(self, codes_BKn: Tensor, first: Tensor, carry: Carry) -> Tensor:
        """→ samples [B, t] in [-1, 1]."""
        net, transformer = self.net, self.net.pre_transformer
        x_BnC = run(net.pre_conv, net.embed(codes_BKn), carry).transpose(1, 2)
        x_BnC = attend(transformer, transformer.input_proj(x_BnC), first, self._window, carry)
        x = run(net.upsample, transformer.output_proj(x_BnC).transpose(1, 2), carry)
        return run(net.decoder, x, carry).clamp(min=-1, max=1)[:, 0]


class Vocoder(StreamingVocoder):
    """Gives samples in [-1, 1]; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        config = read_vocoder(ctx.model_dir)
        decoder = CodeDecoder(load_vocoder(ctx, config), config.decoder_config)
        super().__init__(ctx, decoder, config.output_sample_rate, FRAME_RATE)
