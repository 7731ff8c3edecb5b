"""The networks of Qwen3-TTS.

H hidden size of the talker, W width of its text embeddings, P of the code predictor, G codes per row; B utterances,
K = G codes per frame, n frames, C channels, t samples at a layer's own rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from segue.models.shared.speech.code2wav import UpsamplingConv
from segue.models.shared.speech.library import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeCode2WavTransformerModel,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)
from segue.models.speech.qwen3_tts.config import Decoder, Talker, VocoderDecoder
from segue.models.speech.qwen3_tts.library import ACT2FN, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

_DILATIONS = (1, 3, 9)
_LEAST_USAGE = 1e-5


class TextProjection(nn.Module):
    """[…, W] → […, H]."""

    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, hidden)
        self.act = ACT2FN[activation]

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(self.act(self.linear_fc1(rows)))
        return out


class CodePredictorNet(nn.Module):
    """The decoder of codes 1 to G - 1: `codec_embedding` and `lm_head` of each, and a projection from H to P."""

    def __init__(self, config: Decoder, groups: int, hidden: int) -> None:
        super().__init__()
        self.model = Qwen3Model(_decoder_config(config))
        del self.model.embed_tokens  # each code has its own
        self.codec_embedding = nn.ModuleList(nn.Embedding(config.vocab_size, hidden) for _ in range(groups - 1))
        self.lm_head = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(groups - 1)
        )
        same = config.hidden_size == hidden
        self.small_to_mtp_projection = nn.Identity() if same else nn.Linear(hidden, config.hidden_size)


class TalkerNet(nn.Module):
    """The talker: text embeddings, their projection, a decoder over codes 0 (embedding and head included), and the
    code predictor."""

    def __init__(self, config: Talker) -> None:
        super().__init__()
        self.decoder = Qwen3ForCausalLM(_decoder_config(config))
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.text_projection = TextProjection(config.text_hidden_size, config.hidden_size, config.hidden_act)
        self.code_predictor = CodePredictorNet(config.code_predictor_config, config.num_code_groups, config.hidden_size)


def _decoder_config(config: Decoder) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attention_bias=config.attention_bias,
        tie_word_embeddings=False,
    )


class Codebook(nn.Module):
    """A codebook as its training leaves it: the sum of the vectors that each code stood for, and their number."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.zeros(size, width))
        self.cluster_usage = nn.Parameter(torch.ones(size))

    def forward(self, codes: Tensor) -> Tensor:
        """[B, n] → [B, n, width]."""
        return self.embedding_sum[codes] / self.cluster_usage[codes].clamp(min=_LEAST_USAGE)[..., None]


class ResidualCodebooks(nn.Module):
    """The sum of the vectors of several codebooks, projected."""

    def __init__(self, count: int, size: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Codebook(size, width) for _ in range(count))
        self.output_proj = nn.Conv1d(width, outputs, 1, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """[B, count, n] → [B, outputs, n]."""
        rows = [layer(codes[:, index]) for index, layer in enumerate(self.layers)]
        out: Tensor = self.output_proj(torch.stack(rows).sum(0).transpose(1, 2))
        return out


class PreTransformer(Qwen3OmniMoeCode2WavTransformerModel):
    """The library's transformer, with projections before and after it, which its caller applies."""

    def __init__(self, config: VocoderDecoder) -> None:
        head_dim: dict[str, Any] = {} if config.head_dim is None else {"head_dim": config.head_dim}
        super().__init__(
            Qwen3OmniMoeCode2WavConfig(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                attention_bias=config.attention_bias,
                sliding_window=config.sliding_window,
                hidden_act=config.hidden_act,
                layer_scale_initial_scale=config.layer_scale_initial_scale,
                rms_norm_eps=config.rms_norm_eps,
                **head_dim,
            )
        )
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)


def _upsampled(channels: int, rate: int) -> nn.ModuleList:
    """Upsample by `rate`, to half the channels."""
    half = channels // 2
    units = [Qwen3OmniMoeCode2WavDecoderResidualUnit(half, dilation) for dilation in _DILATIONS]
    return nn.ModuleList([Qwen3OmniMoeSnakeBeta(channels), UpsamplingConv(channels, half, 2 * rate, rate), *units])


class CodesToWave(nn.Module):
    """The decoder of the speech tokenizer: codes of frames → samples. `vocoder` runs it, piece by piece."""

    def __init__(self, config: VocoderDecoder) -> None:
        super().__init__()
        width, latent = config.codebook_dim // 2, config.latent_dim
        self.rvq_first = ResidualCodebooks(1, config.codebook_size, width, config.codebook_dim)
        self.rvq_rest = ResidualCodebooks(config.num_quantizers - 1, config.codebook_size, width, config.codebook_dim)
        self.pre_conv = Qwen3OmniMoeCausalConvNet(config.codebook_dim, latent, 3)
        self.pre_transformer = PreTransformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([UpsamplingConv(latent, latent, ratio, ratio), Qwen3OmniMoeConvNeXtBlock(latent)])
            for ratio in config.upsampling_ratios
        )
        channels = [config.decoder_dim // 2**index for index in range(len(config.upsample_rates) + 1)]
        self.decoder = nn.ModuleList(
            [
                Qwen3OmniMoeCausalConvNet(latent, config.decoder_dim, 7),
                *(_upsampled(own, rate) for own, rate in zip(channels, config.upsample_rates, strict=False)),
                Qwen3OmniMoeSnakeBeta(channels[-1]),
                Qwen3OmniMoeCausalConvNet(channels[-1], 1, 7),
            ]
        )

    def embed(self, codes_BKn: Tensor) -> Tensor:
        """[B, K, n] → [B, codebook_dim, n]."""
        out: Tensor = self.rvq_first(codes_BKn[:, :1]) + self.rvq_rest(codes_BKn[:, 1:])
        return out
