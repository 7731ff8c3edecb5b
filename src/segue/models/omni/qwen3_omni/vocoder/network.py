"""Run the library's Code2Wav over pieces of utterances: each piece continues where the one before it ended.

Every layer looks back a fixed way and never ahead: the attention of the transformer over `sliding_window` frames,
itself included, a convolution over its kernel, a transposed convolution over the inputs that overlap an output. n
frames give `samples(n)`: a transposed convolution gives an output only between two inputs, so that the first input of
an utterance gives none.

B utterances, n frames of each, K codes per frame, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segue.models.omni.qwen3_omni.library import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeConvNeXtBlock,
)
from segue.models.shared.speech.pieces import Carry, Past, Piece, Ring, window


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
        x = self._attend(x, first, carry).transpose(1, 2)
        for blocks in self._net.upsample:
            for block in blocks:
                x = _run(block, x, carry)
        for block in self._net.decoder:
            x = _run(block, x, carry)
        waves = x.clamp(min=-1, max=1)[:, 0].float().cpu()
        return [(wave.clone(), past) for wave, past in zip(waves, carry.pasts(), strict=True)]

    def _attend(self, x_BnC: Tensor, first: Tensor, carry: Carry) -> Tensor:
        """[B, n, C] → the transformer's output; frame i of utterance b is its frame first[b] + i."""
        positions, mask = window(first, x_BnC.shape[1], self._window)
        out: Tensor = self._net.pre_transformer(
            inputs_embeds=x_BnC,
            position_ids=positions,
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            past_key_values=Ring(carry, self._window - 1),
            use_cache=False,
        ).last_hidden_state
        return out


def _run(layer: nn.Module, x: Tensor, carry: Carry) -> Tensor:
    """One layer over [B, C, t]."""
    match layer:
        case Qwen3OmniMoeCausalConvNet():
            return layer.conv(carry.behind(x, layer.padding))
        case Qwen3OmniMoeCausalTransConvNet():
            # the library trims what only one of two inputs makes, at both ends
            back = -(-layer.left_pad // layer.conv.stride[0])
            return layer(carry.behind(x, back, padded=False) if back else x)
        case Qwen3OmniMoeCode2WavDecoderResidualUnit():
            inner = _run(layer.conv1, layer.act1(x), carry)
            return layer.conv2(layer.act2(inner)) + x
        case Qwen3OmniMoeConvNeXtBlock():
            back = layer.dwconv.padding
            return layer(carry.behind(x, back))[..., back:]  # the outputs of what it looks back on were given before
        case Qwen3OmniMoeCode2WavDecoderBlock():
            for inner in layer.block:
                x = _run(inner, x, carry)
            return x
        case _:  # elementwise
            return layer(x)
