"""Encode the recordings of a conversation into codes, as a stage of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.contract import LoadContext
from segue.models.shared.speech import recordings
from segue.models.speech.mimo_audio.config import read_codec, read_config
from segue.models.speech.mimo_audio.loading import load_encoder


class RecordingEncoder(recordings.RecordingEncoder):
    """The encoder of the audio tokenizer; always float32. A last patch that is not full repeats its last frame."""

    def __init__(self, ctx: LoadContext) -> None:
        config = read_config(ctx.model_dir)
        codec = read_codec(ctx.model_dir, config)
        super().__init__(ctx, codec.sampling_rate, codec.hop_length)
        self.net = load_encoder(ctx, codec, config)
        self._device = ctx.device
        self._group = config.group_size

    def encode(self, recordings: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[samples] float32 each → [patches, G · K] long on the CPU each."""
        return [self._patches(self.net(samples.to(self._device)).cpu()) for samples in recordings]

    def _patches(self, codes_nK: torch.Tensor) -> torch.Tensor:
        missing = -len(codes_nK) % self._group
        whole = torch.cat([codes_nK, codes_nK[-1:].expand(missing, -1)])
        return whole.reshape(len(whole) // self._group, -1).contiguous()
