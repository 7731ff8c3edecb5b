"""Run the library's SEANet decoders, Mimi's and its like's, over pieces of utterances. Families name the library's
classes, which differ by model.

Every layer has a bounded left context and no look-ahead: attention its window of positions, a convolution its kernel, a
transposed convolution the inputs that overlap an output. n frames give n times as many samples as one, from the first
frame on.

B utterances, n frames of each, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from segue.messages.errors import ConfigError
from segue.models.shared.speech.pieces import Carry, Ring, window

_CAUSAL = {"use_causal_conv": True, "trim_right_ratio": 1.0, "pad_mode": "constant"}


def check_causal(codec: Any, path: Path, of: str = "") -> None:
    """Raise `ConfigError`, naming the config file, unless a codec's decoder can run piece by piece. `of`: which config
    of the file it is."""
    for name, wanted in _CAUSAL.items():
        if getattr(codec, name) != wanted:
            raise ConfigError(
                f"{path}: {name}{of} is {getattr(codec, name)!r}; served is only {wanted!r}", field="model"
            )


@dataclass(frozen=True, slots=True)
class Kinds:
    """The library's classes of layers. All others are elementwise."""

    conv: type[Any]
    transposed: type[Any]
    residual: type[Any]


@dataclass(frozen=True, slots=True)
class Decoder:
    """What comes after the quantizer: up-sampling, a transformer, the layers of SEANet."""

    upsample: Any
    """None: there is none."""
    transformer: Any
    layers: Sequence[Any]
    window: int
    """Positions that the transformer's attend to, the current one included."""
    kinds: Kinds

    def waves(self, x_BCn: Tensor, first: Tensor, carry: Carry) -> Tensor:
        """Frame i of utterance b is its frame first[b] + i → samples [B, t]."""
        x = x_BCn if self.upsample is None else run(self.upsample, x_BCn, carry, self.kinds)
        rate = x.shape[-1] // x_BCn.shape[-1]
        positions, mask = window(first * rate, x.shape[-1], self.window)
        x = self.transformer(
            x.transpose(1, 2),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=Ring(carry, self.window - 1),
            use_cache=False,
        ).last_hidden_state.transpose(1, 2)
        for layer in self.layers:
            x = run(layer, x, carry, self.kinds)
        return x[:, 0]


def run(layer: Any, x: Tensor, carry: Carry, kinds: Kinds) -> Tensor:
    """One layer over [B, C, t]."""
    out: Tensor
    if isinstance(layer, kinds.conv):
        conv = layer.conv
        back = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - conv.stride[0]
        out = conv(carry.behind(x, back) if back else x)
    elif isinstance(layer, kinds.transposed):
        stride, count = layer.conv.stride[0], x.shape[-1]
        back = -(-(layer.conv.kernel_size[0] - stride) // stride)
        # the library trims what inputs to come would add to
        out = layer(carry.behind(x, back, padded=False) if back else x)
        out = out[..., out.shape[-1] - count * stride :]
    elif isinstance(layer, kinds.residual):
        inner = x
        for part in layer.block:
            inner = run(part, inner, carry, kinds)
        out = inner + run(layer.shortcut, x, carry, kinds)
    else:
        out = layer(x)
    return out
