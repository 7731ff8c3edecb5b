"""Run the library's Code2Wav over pieces of utterances: each piece continues where the one before it ended.

n frames give `samples(n)`: a transposed convolution gives an output only between two inputs, so that the first input of
an utterance gives none.

B utterances, n frames of each, K codes per frame, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeCausalTransConvNet, Qwen3OmniMoeCode2Wav
from segue.models.shared.speech.code2wav import attend, run
from segue.models.shared.speech.pieces import Carry, Past, Piece


class CodeDecoder:
    """The library's network, taken piece by piece."""

    def __init__(self, net: Qwen3OmniMoeCode2Wav) -> None:
        self._net = net
        config = net.config
        self.groups: int = config.num_quantizers
        self.codebook: int = config.codebook_size
        self._window: int = config.sliding_window
        self.device = net.code_embedding.weight.device

    def samples(self, frames: int) -> int:
        """Samples of an utterance of so many frames."""
        count = frames
        for layer in self._net.modules():
            if isinstance(layer, Qwen3OmniMoeCausalTransConvNet) and count:
                count = count * layer.conv.stride[0] - layer.left_pad
        return count

    @torch.inference_mode()
    def decode(self, pieces: Sequence[Piece]) -> list[tuple[Tensor, Past | None]]:
        """Pieces of equal length, all of them the first of their utterance or none: (samples [t] in [-1, 1] on the CPU,
        the utterance's new past) of each."""
        carry = Carry(pieces)
        codes_BKn = torch.stack([piece.codes for piece in pieces]).to(self.device)
        first = torch.tensor([piece.first for piece in pieces], device=self.device)
        x = self._net.code_embedding(codes_BKn + self._net.code_offset).mean(1)
        x = attend(self._net.pre_transformer, x, first, self._window, carry).transpose(1, 2)
        x = run(self._net.decoder, run(self._net.upsample, x, carry), carry)
        waves = x.clamp(min=-1, max=1)[:, 0].float().cpu()
        return [(wave.clone(), past) for wave, past in zip(waves, carry.pasts(), strict=True)]
