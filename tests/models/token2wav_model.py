"""A small Token2Wav with random weights scaled so that it behaves: sound of rms 0.02–0.5, blocks that influence each other."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel

TINY = {"hidden": 64, "layers": 4, "heads": 2, "emb": 32, "speaker": 32, "channels": 64, "codes": 289}
SMALL = {"hidden": 128, "layers": 4, "heads": 2, "emb": 128, "speaker": 64, "channels": 128, "codes": 8193}

_GAINS = {
    "dit_model.proj_out.weight": 2.0,
    "attn.to_q.weight": 1.5,
    "attn.to_k.weight": 1.5,
    "spk_encoder": 1.4,
    "conv_pre.weight": 3.0,
    ".convs2.": 0.5,
    "conv_post.weight": 0.05,
}


def make_token2wav(shape: dict[str, int], seed: int = 0) -> Qwen2_5OmniToken2WavModel:
    """An unmodified float32 `Qwen2_5OmniToken2WavModel` in eval mode."""
    config = Qwen2_5OmniToken2WavConfig(dit_config=_dit(shape), bigvgan_config=_bigvgan(shape))
    config._attn_implementation = "sdpa"
    model = Qwen2_5OmniToken2WavModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_scaled(name, torch.randn(parameter.shape, generator=generator)))
        model.code2wav_dit_model.proj_out.bias -= 4.0  # log-mel spectra of speech lie between -11.5 and 2
        post = model.code2wav_bigvgan_model.conv_post.weight
        post -= post.mean(dim=-1, keepdim=True)
    return model


def make_speakers(seed: int = 1, frames: int = 50) -> dict[str, dict[str, torch.Tensor]]:
    """Two voices in the form of the published speaker file."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {
            "cond": torch.randn(1, 192, generator=generator),
            "ref_mel": torch.randn(1, frames, 80, generator=generator) - 4.0,
        }
        for name in ("Chelsie", "Ethan")
    }


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith((".act.alpha", ".act.beta")):
        return 0.3 * noise
    if name.endswith("bias"):
        return 0.05 * noise
    if name.endswith("codec_embed.weight"):
        return noise
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    fan_in = noise.shape[0] * 2 if ".ups." in name else noise[0].numel()
    return gain / math.sqrt(fan_in) * noise


def _dit(shape: dict[str, int]) -> dict[str, Any]:
    speaker = shape["speaker"]
    return {
        "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "head_dim": shape["hidden"] // shape["heads"],
        "emb_dim": shape["emb"],
        "look_ahead_layers": [shape["layers"] // 2],
        "look_backward_layers": [0, shape["layers"] - 1],
        "num_embeds": shape["codes"],
        "enc_dim": speaker,
        "enc_channels": [speaker] * 4 + [3 * speaker],
        "enc_attention_channels": speaker // 2,
        "enc_se_channels": speaker // 2,
    }


def _bigvgan(shape: dict[str, int]) -> dict[str, Any]:
    return {"upsample_initial_channel": shape["channels"]}
