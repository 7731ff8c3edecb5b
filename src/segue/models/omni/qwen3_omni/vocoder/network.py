"""Run the library's Code2Wav over pieces of utterances: each piece continues where the one before it ended.

Every layer looks back a fixed way and never ahead: the attention of the transformer over `sliding_window` frames,
itself included, a convolution over its kernel, a transposed convolution over the inputs that overlap an output. What
a layer looks back on is kept per utterance (`Past`), so that the pieces of an utterance, in any split, give what one
call over all its codes gives. n frames give `samples(n)`: a transposed convolution gives an output only between two
inputs, so that the first input of an utterance gives none.

B utterances, n frames of each, K codes per frame, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

Past = list[Tensor]
"""What the layers of one utterance look back on, in the order of their calls: [C, t], or [heads, frames, head_dim]."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next frames of one utterance."""

    codes: Tensor
    """[K, n] long, n ≥ 1."""
    first: int
    """Frames of the utterance before these."""
    past: Past | None
    """None at its first frame."""


class _Carry:
    """What the layers look back on in one call; a layer's index is the number of calls before its own."""

    def __init__(self, pasts: Sequence[Past] | None) -> None:
        self._past = None if pasts is None else [torch.stack(own) for own in zip(*pasts, strict=True)]
        self._kept: list[Tensor] = []

    @property
    def begins(self) -> bool:
        """These are the utterances' first frames."""
        return self._past is None

    def behind(self, x: Tensor, size: int, dim: int = -1, *, padded: bool = True) -> Tensor:
        """Put the last `size` inputs before `x` in front of it, and keep its own last ones. At the utterances' first
        frames these are zeros, or nothing if not `padded`."""
        if self._past is not None:
            x = torch.cat([self._past[len(self._kept)], x], dim=dim)
        elif padded:
            shape = list(x.shape)
            shape[dim] = size
            x = torch.cat([x.new_zeros(shape), x], dim=dim)
        self._kept.append(x.narrow(dim, x.shape[dim] - size, size))
        return x

    def pasts(self) -> list[Past]:
        """Per utterance, for its next piece."""
        # views would keep the past of the whole batch alive
        return [[part.clone() for part in own] for own in zip(*(kept.unbind() for kept in self._kept), strict=True)]


class _Ring:
    """The cache that the library's attention layers append their keys and values to."""

    def __init__(self, carry: _Carry, size: int) -> None:
        self._carry, self._size = carry, size

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: object) -> tuple[Tensor, Tensor]:
        """[B, heads, n, head_dim] → the same behind those of the frames before."""
        return self._carry.behind(keys, self._size, dim=-2), self._carry.behind(values, self._size, dim=-2)


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
        pasts = [piece.past for piece in pieces if piece.past is not None]
        assert len(pasts) in (0, len(pieces)), "first pieces run apart from later ones"
        carry = _Carry(pasts or None)
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

    def _attend(self, x_BnC: Tensor, first: Tensor, carry: _Carry) -> Tensor:
        """[B, n, C] → the transformer's output; frame i of utterance b is its frame first[b] + i."""
        back, count = self._window - 1, x_BnC.shape[1]
        positions = first[:, None] + torch.arange(count, device=first.device)
        keys = first[:, None] + torch.arange(-back, count, device=first.device)
        ago = positions[:, :, None] - keys[:, None]
        seen = (ago >= 0) & (ago < self._window) & (keys >= 0)[:, None]
        mask = seen[:, None]
        out: Tensor = self._net.pre_transformer(
            inputs_embeds=x_BnC,
            position_ids=positions,
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            past_key_values=_Ring(carry, back),
            use_cache=False,
        ).last_hidden_state
        return out


def _run(layer: nn.Module, x: Tensor, carry: _Carry) -> Tensor:
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
