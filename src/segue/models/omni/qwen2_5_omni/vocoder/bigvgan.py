"""Run BigVGAN (arXiv 2206.04658) on mel frames that arrive in pieces.

Layers and weights are those of `Qwen2_5OmniToken2WavBigVGANModel`; this file only defines the order in which they run,
with memory. However the mel is split, the samples equal those of the module's own forward on the whole mel.

Optional reading: a network of the vocoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segue.kernels.conv.streaming_conv import (
    Chain,
    Layer,
    Pointwise,
    Sum,
    conv_layer,
    downsample_layer,
    transposed_conv_layer,
    upsample_layer,
)
from segue.kernels.operations import snake

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniAMPBlock,
        Qwen2_5OmniAntiAliasedActivation1d,
        Qwen2_5OmniSnakeBeta,
        Qwen2_5OmniToken2WavBigVGANModel,
    )


class BigVGAN:
    """The vocoder's weights, prepared for streaming. `samples_per_frame` is 240 in the published checkpoints."""

    def __init__(self, model: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        self._model = model
        self._device = model.conv_pre.weight.device
        self._layers = _walk(model)
        self.mel_dim = model.config.mel_dim
        self.samples_per_frame = 1
        for rate in model.config.upsample_rates:
            self.samples_per_frame *= rate

    def open(self) -> WaveStream:
        """Start a new waveform."""
        return WaveStream(self._model, self._layers, self._device)


class WaveStream:
    """The waveform of one utterance in progress. Keeps per layer the inputs that later windows need."""

    def __init__(self, model: Qwen2_5OmniToken2WavBigVGANModel, layers: Layer, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._stream = layers.open()

    @torch.inference_mode()
    def push(self, mel: Tensor, *, final: bool = False) -> Tensor:
        """[frames, mel_dim] float32 next frames (may be empty) → [n] float32 samples in [-1, 1] they determine, on CPU.

        With `final`, returns the rest: over a whole utterance, frames · samples_per_frame samples.
        """
        processed = self._model.process_mel_spectrogram(mel.to(self._device).T)
        samples = self._stream.push(processed, final=final)
        return samples.clamp_(-1.0, 1.0)[0].cpu()


def _walk(model: Qwen2_5OmniToken2WavBigVGANModel) -> Layer:
    """The module's `forward` as streamable layers."""
    layers: list[Layer] = [conv_layer(model.conv_pre)]
    for index in range(model.num_upsample_layers):
        layers.append(transposed_conv_layer(_only(model.ups[index])))
        first = index * model.num_residual_blocks
        blocks = [_block(model.resblocks[first + offset]) for offset in range(model.num_residual_blocks)]
        layers.append(Sum(blocks, scale=1.0 / model.num_residual_blocks))
    layers.append(_activation(model.activation_post))
    layers.append(conv_layer(model.conv_post))
    return Chain(layers)


def _only(group: nn.ModuleList) -> nn.ConvTranspose1d:
    """The only element: the checkpoint keeps each transposed convolution in a list of one."""
    [layer] = group
    assert isinstance(layer, nn.ConvTranspose1d)
    return layer


def _block(block: Qwen2_5OmniAMPBlock) -> Layer:
    steps: list[Layer] = []
    acts = [_activation(activation) for activation in block.activations]
    for conv1, conv2, act1, act2 in zip(block.convs1, block.convs2, acts[::2], acts[1::2], strict=True):
        steps.append(Sum([Chain([act1, conv_layer(conv1), act2, conv_layer(conv2)])], residual=True))
    return Chain(steps)


def _activation(module: Qwen2_5OmniAntiAliasedActivation1d) -> Layer:
    """Upsample, snake, downsample: the nonlinearity runs at twice the rate to avoid aliasing."""
    up, down = module.upsample, module.downsample
    channels = module.act.in_features
    return Chain(
        [
            upsample_layer(up.filter.flatten(), channels, up.ratio),
            Pointwise(_snake(module.act)),
            downsample_layer(down.filter.flatten(), channels, down.stride),
        ]
    )


def _snake(module: Qwen2_5OmniSnakeBeta) -> Callable[[Tensor], Tensor]:
    """x + sin²(αx) / β over [channels, samples]; α and β are exponentiated once."""
    alpha = module.alpha.detach().exp()
    over_beta = 1.0 / (module.beta.detach().exp() + module.no_div_by_zero)

    def run(x: Tensor) -> Tensor:
        return snake(x, alpha, over_beta)

    return run
