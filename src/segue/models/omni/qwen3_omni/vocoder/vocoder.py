"""The vocoder stage of Qwen3-Omni."""

from __future__ import annotations

from segue.engines.contract import LoadContext
from segue.models.omni.qwen3_omni.loading import load_code2wav, load_config
from segue.models.omni.qwen3_omni.vocoder.network import CodeDecoder
from segue.models.shared.speech.vocoder import StreamingVocoder

SAMPLE_RATE = 24000


class Code2Wav(StreamingVocoder):
    """Gives samples in [-1, 1]; always float32."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx, CodeDecoder(load_code2wav(ctx, load_config(ctx))), SAMPLE_RATE)
