"""The vocoder stage of Qwen3-Omni: the library's Code2Wav, taken piece by piece.

A transposed convolution gives an output only between two inputs, so that the first input of an utterance gives none.

B utterances, n frames of each, K codes per frame, t samples.
"""

from __future__ import annotations

from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeCode2Wav
from segue.models.omni.qwen3_omni.loading import load_code2wav, load_config
from segue.models.shared.speech.code2wav import FRAME_RATE, attend, run, take_snakes
from segue.models.shared.speech.pieces import Carry, CausalDecoder
from segue.models.shared.speech.vocoder import StreamingVocoder

SAMPLE_RATE = 24000


class CodeDecoder(CausalDecoder):
    """The library's network, taken piece by piece."""

    def __init__(self, net: Qwen3OmniMoeCode2Wav) -> None:
        config = net.config
        take_snakes(net)
        super().__init__(config.num_quantizers, config.codebook_size, net.code_embedding.weight.device)
        self._net = net
        self._window: int = config.sliding_window

    def waves(self, codes_BKn: Tensor, first: Tensor, carry: Carry) -> Tensor:
        """→ samples [B, t] in [-1, 1]."""
        x = self._net.code_embedding(codes_BKn + self._net.code_offset).mean(1)
        x = attend(self._net.pre_transformer, x, first, self._window, carry).transpose(1, 2)
        x = run(self._net.decoder, run(self._net.upsample, x, carry), carry)
        return x.clamp(min=-1, max=1)[:, 0]


class Code2Wav(StreamingVocoder):
    """Gives samples in [-1, 1]; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx, CodeDecoder(load_code2wav(ctx, load_config(ctx))), SAMPLE_RATE, FRAME_RATE)
