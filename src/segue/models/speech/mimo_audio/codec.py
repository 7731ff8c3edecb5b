"""The networks of the audio tokenizer: samples → codes, and codes → samples.

B recordings of equal length, t frames at a layer's own rate, C width, K codes per frame, n frames of codes.

Encoder: log-mel spectrogram → two convolutions (the second of stride 2) → transformer layers (the output of an early
one is added to the last's) → pooling → residual codebooks. Decoder: the sum of the codes' vectors → a transposed
convolution → causal layers → a second one, which gives a coarse spectrogram → layers with a window → inverse STFT. A
norm over all frames follows each transposed convolution, so every sample depends on every frame of the same call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.models.speech.mimo_audio.config import Codec, segments_of
from segue.models.speech.mimo_audio.library import mel_filter_bank

_LEAST = 1e-7
"""Of the spectrogram, before the logarithm."""
_LOUDEST = 100.0
"""Of a bin of the spectrogram that the decoder makes."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BtC: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        query, key, value = (
            project(x_BtC).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = functional.scaled_dot_product_attention(
            _rotated(query, rotary), _rotated(key, rotary), value, attn_mask=mask
        )
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, feed_forward)
        self.fc2 = nn.Linear(feed_forward, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x_BtC: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x_BtC = x_BtC + self.self_attn(self.self_attn_layer_norm(x_BtC), rotary, mask)
        return x_BtC + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x_BtC))))


class Codebook(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(size, width))

    def nearest(self, x_BnC: Tensor) -> Tensor:
        """[B, n, C] → [B, n] codes."""
        far = x_BnC.square().sum(-1, keepdim=True) - 2 * x_BnC @ self.embed.T + self.embed.square().sum(-1)
        return far.argmin(-1)

    def vectors(self, codes: Tensor) -> Tensor:
        """[B, n] codes → [B, n, C]."""
        return self.embed[codes]


class Quantizer(nn.Module):
    """The first codebooks of the residual quantizer: those whose codes the language model has."""

    def __init__(self, codec: Codec, channels: int) -> None:
        super().__init__()
        self.books = nn.ModuleList(Codebook(codec.codes_of(channel), codec.d_model) for channel in range(channels))

    @property
    def _books(self) -> Iterator[Codebook]:
        return (book for book in self.books if isinstance(book, Codebook))

    def encode(self, x_BnC: Tensor) -> Tensor:
        """[B, n, C] → [B, n, K]."""
        codes = []
        for book in self._books:
            codes.append(book.nearest(x_BnC))
            x_BnC = x_BnC - book.vectors(codes[-1])
        return torch.stack(codes, dim=-1)

    def decode(self, codes_BnK: Tensor) -> Tensor:
        """[B, n, K] → [B, n, C]."""
        vectors = [book.vectors(codes_BnK[..., channel]) for channel, book in enumerate(self._books)]
        return torch.stack(vectors).sum(0)


class Encoder(nn.Module):
    def __init__(self, codec: Codec, channels: int) -> None:
        super().__init__()
        width = codec.d_model
        self.codec = codec
        self.conv1 = nn.Conv1d(codec.n_mels, width, codec.kernel_size, padding=1)
        self.conv2 = nn.Conv1d(width, width, codec.kernel_size, stride=codec.stride_size, padding=1)
        self.layers = nn.ModuleList(
            Layer(width, codec.encoder_attention_heads, codec.encoder_ffn_dim) for _ in range(codec.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(width)
        self.pool = nn.Conv1d(width, width, codec.avg_pooler, codec.avg_pooler, bias=False)
        self.pool_norm = nn.LayerNorm(width)
        self.quantizer = Quantizer(codec, channels)

    def forward(self, samples: Tensor) -> Tensor:
        """[samples] of a recording → [n, K] codes. A minute is encoded at a time."""
        mel = spectrogram(samples, self.codec)
        coded = []
        for number, segment in enumerate(mel.split(segments_of(mel.shape[-1]), dim=-1)):
            coded.append(self.quantizer.encode(self._features(segment, followed=number > 0))[0])
        return torch.cat(coded)

    def _features(self, mel: Tensor, *, followed: bool) -> Tensor:
        """[mels, t] → [1, n, C]. `followed`: it is not the first segment of its recording. As in the published code,
        which encodes the segments as one padded batch, an odd end of it then reads what follows otherwise."""
        codec = self.codec
        length = mel.shape[-1]
        if followed:
            mel = functional.pad(mel, (0, codec.stride_size))
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(mel[None])))).transpose(1, 2)
        x = x[:, : -(-length // codec.stride_size)]
        rotary = _rotary(x, codec, codec.encoder_attention_heads)
        mask = window_mask(x, codec.encoder_attn_window_size, causal=codec.encoder_causal)
        early: Tensor | float = 0.0
        for number, layer in enumerate(self.layers, 1):
            x = layer(x, rotary, mask)
            if number == codec.encoder_skip_layer_id:
                early = x
        x = self.layer_norm(x + early)
        if odd := -x.shape[1] % codec.avg_pooler:
            end = x[:, -1:].expand(-1, odd, -1) if followed else x.new_zeros(1, odd, x.shape[2])
            x = torch.cat([x, end], dim=1)
        return self.pool_norm(functional.gelu(self.pool(x.transpose(1, 2))).transpose(1, 2))


class Upsampling(nn.Module):
    """A transposed convolution, and a norm over all its frames and channels."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride)
        self.norm = nn.GroupNorm(1, outputs)

    def forward(self, x_BtC: Tensor) -> Tensor:
        """[B, t, C] → [B, stride · t, C']."""
        x = self.norm(self.conv(x_BtC.transpose(1, 2))).transpose(1, 2)
        return x[:, : x.shape[1] - max(0, self.conv.kernel_size[0] - self.conv.stride[0])]


class Vocos(nn.Module):
    """A spectrogram of mels → samples."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        width = codec.vocoder_dim
        self.codec = codec
        self.embeddings = nn.Linear(codec.n_mels, width, bias=False)
        self.layers = nn.ModuleList(
            Layer(width, codec.vocoder_attention_heads, codec.vocoder_intermediate_dim)
            for _ in range(codec.vocoder_num_layers)
        )
        self.layer_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, codec.nfft + 2)

    def forward(self, mel_BtM: Tensor) -> Tensor:
        """[B, t, mels] → [B, samples]."""
        x = self.embeddings(mel_BtM)
        rotary = _rotary(x, self.codec, self.codec.vocoder_attention_heads)
        mask = window_mask(x, self.codec.vocoder_attn_window_size, causal=False)
        for layer in self.layers:
            x = layer(x, rotary, mask)
        size, phase = self.out(self.layer_norm(x)).transpose(1, 2).float().chunk(2, dim=1)
        spectrum = torch.polar(size.exp().clamp(max=_LOUDEST), phase)
        return inverse(spectrum, self.codec.nfft, self.codec.hop_length)


class Decoder(nn.Module):
    def __init__(self, codec: Codec, channels: int) -> None:
        super().__init__()
        width = codec.d_model
        self.codec = codec
        self.quantizer = Quantizer(codec, channels)
        self.dconv1 = Upsampling(width, width, codec.avg_pooler, codec.avg_pooler)
        self.layers = nn.ModuleList(
            Layer(width, codec.decoder_attention_heads, codec.decoder_ffn_dim) for _ in range(codec.decoder_layers)
        )
        self.layer_norm = nn.LayerNorm(width)
        self.dconv2 = Upsampling(width, codec.n_mels, codec.decoder_kernel_size, codec.decoder_stride_size)
        self.vocoder = Vocos(codec)

    def forward(self, codes_BnK: Tensor) -> Tensor:
        """[B, n, K] → [B, samples]."""
        x = self.dconv1(self.quantizer.decode(codes_BnK))
        rotary = _rotary(x, self.codec, self.codec.decoder_attention_heads)
        mask = window_mask(x, self.codec.decoder_attn_window_size, causal=self.codec.decoder_causal)
        for layer in self.layers:
            x = layer(x, rotary, mask)
        samples: Tensor = self.vocoder(self.dconv2(self.layer_norm(x)))
        return samples


def spectrogram(samples: Tensor, codec: Codec) -> Tensor:
    """[samples] → [mels, t]: the logarithm of the magnitudes in mel bands."""
    window = torch.hann_window(codec.nfft, device=samples.device)
    spectrum = torch.stft(samples, codec.nfft, codec.hop_length, window=window, return_complex=True).abs()
    bands = mel_filter_bank(
        num_frequency_bins=codec.nfft // 2 + 1,
        num_mel_filters=codec.n_mels,
        min_frequency=codec.fmin,
        max_frequency=codec.sampling_rate / 2 if codec.fmax is None else codec.fmax,
        sampling_rate=codec.sampling_rate,
    )
    return (torch.from_numpy(bands).to(spectrum).T @ spectrum).clamp(min=_LEAST).log()


def inverse(spectrum_BFt: Tensor, size: int, hop: int) -> Tensor:
    """[B, F, t] complex → [B, hop · t]: the inverse STFT, padded like a convolution that keeps its length."""
    window = torch.hann_window(size, device=spectrum_BFt.device)
    frames = torch.fft.irfft(spectrum_BFt, size, dim=1) * window[:, None]
    count = frames.shape[-1]
    length = (count - 1) * hop + size
    weights = window.square()[None, :, None].expand(1, size, count)
    summed, weight = (
        functional.fold(part, (1, length), (1, size), stride=(1, hop))[:, 0, 0] for part in (frames, weights)
    )
    outside = (size - hop) // 2
    return (summed / weight.clamp(min=torch.finfo(weight.dtype).tiny))[:, outside : length - outside]


def window_mask(x_BtC: Tensor, window: tuple[int, int], *, causal: bool) -> Tensor | None:
    """[t, t] bool: which frames (columns) each frame attends to; None: all. `window`: frames before and after; -1:
    all."""
    before, after = window[0], 0 if causal else window[1]
    if before < 0 and after < 0:
        return None
    places = torch.arange(x_BtC.shape[1], device=x_BtC.device)
    ahead = places[None, :] - places[:, None]
    mask = torch.ones_like(ahead, dtype=torch.bool)
    if before >= 0:
        mask &= ahead >= -before
    if after >= 0:
        mask &= ahead <= after
    return mask


def _rotary(x_BtC: Tensor, codec: Codec, heads: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [t, head dim]."""
    dim = x_BtC.shape[-1] // heads
    rates = codec.rope_theta ** (-torch.arange(0, dim, 2, device=x_BtC.device, dtype=torch.float32) / dim)
    angles = torch.arange(x_BtC.shape[1], device=x_BtC.device, dtype=torch.float32)[:, None] * rates
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(x_BtC.dtype), angles.sin().to(x_BtC.dtype)


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, heads, t, head dim] → the same, with RoPE."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]
