"""Streamed convolutions against torch's own on the whole signal, for any way of cutting it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
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

pytestmark = pytest.mark.slow

LENGTHS = st.lists(st.integers(0, 17), min_size=1, max_size=8)


def streamed(layer: Layer, x: Tensor, lengths: list[int], *, close_apart: bool = False) -> Tensor:
    """x cut into pieces of `lengths` (the rest in one), the last of them final, or an empty one after it."""
    cuts = [*lengths, x.shape[-1] - sum(lengths)]
    stream = layer.open()
    with torch.inference_mode():
        pieces = [
            stream.push(piece, final=index == len(cuts) - 1 and not close_apart)
            for index, piece in enumerate(x.split(cuts, dim=-1))
        ]
        if close_apart:
            pieces.append(stream.push(x[:, :0], final=True))
    return torch.cat(pieces, dim=-1)


def signal(channels: int, samples: int) -> Tensor:
    return torch.randn(channels, samples, generator=torch.Generator().manual_seed(0))


def check(layer: Layer, x: Tensor, whole: Tensor, lengths: list[int], close_apart: bool) -> None:
    got = streamed(layer, x, lengths, close_apart=close_apart)
    torch.testing.assert_close(got, whole, atol=2e-6, rtol=1e-5)


@given(LENGTHS, st.integers(0, 5), st.booleans(), st.sampled_from([(3, 1), (7, 3), (11, 5)]), st.sampled_from([2, 12]))
@settings(max_examples=60, deadline=None)
def test_conv(lengths: list[int], rest: int, close_apart: bool, shape: tuple[int, int], channels: int) -> None:
    kernel, dilation = shape
    torch.manual_seed(0)
    conv = nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=(kernel - 1) * dilation // 2)
    x = signal(channels, sum(lengths) + rest + 1)
    check(conv_layer(conv), x, conv(x).detach(), lengths, close_apart)


@given(LENGTHS, st.integers(0, 5), st.booleans(), st.sampled_from([(11, 5), (7, 3), (4, 2), (2, 2)]))
@settings(max_examples=60, deadline=None)
def test_transposed_conv(lengths: list[int], rest: int, close_apart: bool, shape: tuple[int, int]) -> None:
    kernel, stride = shape
    torch.manual_seed(0)
    conv = nn.ConvTranspose1d(6, 3, kernel, stride, padding=(kernel - stride) // 2)
    x = signal(6, sum(lengths) + rest + 1)
    check(transposed_conv_layer(conv), x, conv(x).detach(), lengths, close_apart)


def up_whole(x: Tensor, taps: Tensor, ratio: int) -> Tensor:
    """Zeros between samples, filter, centre: by definition, over a generously padded signal."""
    pad = len(taps)
    padded = F.pad(x[:, None], (pad, pad), mode="replicate")
    full = ratio * F.conv_transpose1d(padded, taps[None, None], stride=ratio)[:, 0]
    first = pad * ratio + (len(taps) - ratio) // 2
    return full[:, first : first + ratio * x.shape[-1]]


def down_whole(x: Tensor, taps: Tensor, ratio: int) -> Tensor:
    pad = (len(taps) // 2 - (len(taps) % 2 == 0), len(taps) // 2)
    return F.conv1d(F.pad(x[:, None], pad, mode="replicate"), taps[None, None], stride=ratio)[:, 0]


@given(LENGTHS, st.integers(0, 5), st.booleans(), st.sampled_from([2, 3]))
@settings(max_examples=60, deadline=None)
def test_anti_aliased_activation(lengths: list[int], rest: int, close_apart: bool, ratio: int) -> None:
    taps = signal(1, 6 * ratio)[0]
    x = signal(3, sum(lengths) + rest + 1)
    layer = Chain([upsample_layer(taps, 3, ratio), Pointwise(torch.tanh), downsample_layer(taps, 3, ratio)])
    whole = down_whole(up_whole(x, taps, ratio).tanh(), taps, ratio)
    assert whole.shape == x.shape
    got = streamed(layer, x, lengths, close_apart=close_apart)
    torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


@given(LENGTHS, st.integers(0, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_branches_of_different_delay_meet(lengths: list[int], rest: int, close_apart: bool) -> None:
    torch.manual_seed(0)
    short, long = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 11, padding=5)
    x = signal(4, sum(lengths) + rest + 1)
    layer = Sum([conv_layer(short), conv_layer(long)], residual=True, scale=0.5)
    check(layer, x, ((short(x) + long(x) + x) * 0.5).detach(), lengths, close_apart)


def test_each_sample_comes_as_soon_as_it_is_determined() -> None:
    conv = nn.Conv1d(1, 1, 5, padding=2)
    stream = conv_layer(conv).open()
    x = signal(1, 10)
    with torch.inference_mode():
        assert [stream.push(x[:, index : index + 1]).shape[-1] for index in range(10)] == [0, 0] + [1] * 8
        assert stream.push(x[:, :0], final=True).shape[-1] == 2


def test_a_signal_without_samples_gives_none() -> None:
    conv = nn.Conv1d(2, 3, 5, padding=2)
    assert conv_layer(conv).open().push(torch.empty(2, 0), final=True).shape == (3, 0)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv1d(2, 2, 3, stride=2),
        nn.Conv1d(2, 2, 3, groups=2),
        nn.Conv1d(2, 2, 3, padding="same"),
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect"),
    ],
)
def test_convolutions_of_another_kind_are_refused(conv: nn.Conv1d) -> None:
    with pytest.raises(ValueError, match="cannot be streamed"):
        conv_layer(conv)


def test_transposed_convolutions_that_do_not_multiply_the_rate_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be streamed"):
        transposed_conv_layer(nn.ConvTranspose1d(2, 2, 5, 2, padding=1))
