"""The vocoder: rows of delayed codes → frames → samples, by the decoder of the codec over windows of frames.

The codec is not causal: a sample depends on frames before and after its own. A piece of an utterance is decoded with as
many frames around it as its samples depend on (`reach`), so that the pieces, in any split, give what one call over the
whole utterance gives. The look-ahead of the published shape is 10 frames (0.4 s at 25 frames per second), and 7 more
rows for the delay of the codebooks.

K codebooks, n rows or frames, t samples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.shared.speech.rows import check_codes
from segue.models.shared.speech.vocoder import StreamingVocoder
from segue.models.shared.speech.windows import WindowDecoder
from segue.models.speech.higgs_audio_v2.library import DacDecoder
from segue.models.speech.higgs_audio_v2.loading import (
    SPECIAL,
    DecoderHalf,
    load_codec,
    load_codec_config,
    load_config,
)

PIECES = (2, 4, 8, 16, 32)
"""Frames of an utterance's first, second, … piece; the last entry repeats. Later pieces grow, because each is decoded
with the frames around it."""


def reach(decoder: DacDecoder) -> tuple[int, int]:
    """(frames before, frames after) a frame on which its samples depend, at most."""
    rate, behind, ahead = 1, 0.0, 0.0
    modules: Any = decoder.modules()
    for module in modules:
        match module:
            case torch.nn.Conv1d():
                way = module.dilation[0] * (module.kernel_size[0] - 1) / 2
                behind, ahead = behind + way / rate, ahead + way / rate
            case torch.nn.ConvTranspose1d():
                kernel, stride, padding = module.kernel_size[0], module.stride[0], int(module.padding[0])
                behind += (kernel - 1 - padding) / stride / rate
                ahead += padding / stride / rate
                rate *= stride
    return math.ceil(behind), math.ceil(ahead)


class CodecDecoder(WindowDecoder):
    """The library's codec."""

    def __init__(self, codec: DecoderHalf, groups: int, codes: int, hop: int, device: torch.device) -> None:
        """`groups`: K, each of `codes` codes."""
        super().__init__(groups, groups, PIECES, reach(codec.acoustic_decoder), hop)
        self.library_codec = codec
        self._codes, self._device = codes, device

    def waves(self, codes_BKn: Tensor) -> Tensor:
        waves: Tensor = self.library_codec(codes_BKn.to(self._device))
        return waves

    def frames(self, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The first row of an utterance is its beginning; codebook k is k rows late. The beginning and the end of the
        stream are decoded as the last code, as in the library."""
        check_codes(rows, self._codes, SPECIAL)
        if first == 0:
            rows = rows[1:]
        count = max(len(rows) - (self.groups - 1), 0)
        frames = torch.stack([rows[book : book + count, book] for book in range(self.groups)], dim=1)
        return frames.clamp(max=self._codes - 1), rows[count:]


class Vocoder(StreamingVocoder):
    """The codec's decoder as a stage; always float32. Its rows are delayed."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an option, because it has none, and for an unreadable checkpoint."""
        codec = load_codec_config(ctx.model_dir, load_config(ctx))
        rate: int = codec.sample_rate
        hop = math.prod(codec.acoustic_model_config.upsampling_ratios)
        decoder = CodecDecoder(load_codec(ctx, codec), codec.num_quantizers, codec.codebook_size, hop, ctx.device)
        super().__init__(ctx, decoder, rate, rate / hop)
