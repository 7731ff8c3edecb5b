"""Run the layers of the library's Code2Wav, of which the vocoders of Qwen's speech models consist, over pieces of
utterances.

Every layer has a bounded left context and no look-ahead: attention a window of frames, a convolution its
kernel, a transposed convolution the inputs that overlap an output.

B utterances, n frames of each, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from torch import Tensor, nn

from segue.kernels.operations import snake
from segue.models.shared.library import PreTrainedModel
from segue.models.shared.speech.library import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)
from segue.models.shared.speech.pieces import Carry, Ring, window

FRAME_RATE = 12.5
"""Frames of codes per second in both families."""


class Snake(nn.Module):
    """The library's, its exponentials taken once."""

    frequencies: Tensor
    shares: Tensor

    def __init__(self, frequencies: Tensor, magnitudes: Tensor, least: float) -> None:
        """Both are stored as logarithms [C]; `least` is added to a magnitude, by which the sine is divided."""
        super().__init__()
        self.register_buffer("frequencies", frequencies.detach().exp(), persistent=False)
        self.register_buffer("shares", 1.0 / (magnitudes.detach().exp() + least), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, t] → the same."""
        return snake(x, self.frequencies, self.shares)


def take_snakes(net: nn.Module) -> None:
    """Replace the library's snake activations under `net`, whose weights are loaded."""
    for name, module in list(net.named_modules()):
        if isinstance(module, Qwen3OmniMoeSnakeBeta):
            net.set_submodule(name, Snake(module.alpha, module.beta, module.no_div_by_zero))


class UpsamplingConv(nn.Module):
    """A transposed convolution that gives `stride` samples per input: the first are those of the first input alone."""

    def __init__(self, channels: int, outputs: int, kernel: int, stride: int) -> None:
        """`kernel` must be a multiple of `stride`."""
        super().__init__()
        assert kernel % stride == 0, f"a kernel of {kernel} overlaps inputs of stride {stride} unevenly"
        self.conv = nn.ConvTranspose1d(channels, outputs, kernel, stride=stride)
        self.stride = stride
        self.back = kernel // stride - 1
        """Inputs before its own that an output depends on."""


def attend(transformer: PreTrainedModel, x_BnC: Tensor, first: Tensor, size: int, carry: Carry) -> Tensor:
    """[B, n, C] → the transformer's output [B, n, C]. Frame i of utterance b is its frame first[b] + i, and attends to
    `size` frames, itself included."""
    positions, mask = window(first, x_BnC.shape[1], size)
    out: Tensor = transformer(
        inputs_embeds=x_BnC,
        position_ids=positions,
        attention_mask={"full_attention": mask, "sliding_attention": mask},
        past_key_values=Ring(carry, size - 1),
        use_cache=False,
    ).last_hidden_state
    return out


def run(layer: nn.Module, x: Tensor, carry: Carry) -> Tensor:
    """One layer over [B, C, t]."""
    match layer:
        case Qwen3OmniMoeCausalConvNet():
            return layer.conv(carry.behind(x, layer.padding))
        case Qwen3OmniMoeCausalTransConvNet():
            # the library trims what only one of two inputs makes, at both ends
            back = -(-layer.left_pad // layer.conv.stride[0])
            return layer(carry.behind(x, back, padded=False) if back else x)
        case UpsamplingConv():
            count = x.shape[-1] * layer.stride
            x = carry.behind(x, layer.back) if layer.back else x
            return layer.conv(x).narrow(-1, layer.back * layer.stride, count)
        case Qwen3OmniMoeCode2WavDecoderResidualUnit():
            return layer.conv2(layer.act2(run(layer.conv1, layer.act1(x), carry))) + x
        case Qwen3OmniMoeConvNeXtBlock():
            back = layer.dwconv.padding
            return layer(carry.behind(x, back))[..., back:]  # the outputs of the left context were returned before
        case Qwen3OmniMoeCode2WavDecoderBlock():
            return run(layer.block, x, carry)
        case nn.ModuleList():
            for inner in layer:
                x = run(inner, x, carry)
            return x
        case _:  # elementwise
            return layer(x)
