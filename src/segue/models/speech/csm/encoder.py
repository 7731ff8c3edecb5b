"""Encode the recordings of a conversation with the library's Mimi, as a stage of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.contract import LoadContext
from segue.models.shared.speech.recordings import RecordingEncoder
from segue.models.speech.csm.loading import load_config, load_encoder

_SAMPLES_PER_COST = 240


class Encoder(RecordingEncoder):
    """The codec's encoder; always float32. Recordings are encoded whole, as in the library: it has no mask for
    padding."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        super().__init__(ctx, config.codec_config.sampling_rate, _SAMPLES_PER_COST)
        self._codec = load_encoder(ctx, config)
        self._device = ctx.device

    def encode(self, recordings: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[samples] float32 each → [frames, K] long on the CPU each."""
        return [
            self._codec.encode(samples.to(self._device)[None, None], return_dict=True).audio_codes[0].T.cpu()
            for samples in recordings
        ]
