"""Draw random weights under which every branch of the networks carries signal of order one.

Each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as inputs; the gains were chosen by
measurement (the tests of the tiny preset state the targets).
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from segue.models.speech.pocket_tts.library import (
    PocketTTSAudioTokenizerConfig,
    PocketTTSAudioTokenizerModel,
    PocketTTSConfig,
    PocketTTSForConditionalGeneration,
)
from segue.models.speech.pocket_tts.tiny.config import THRESHOLD

# (pattern of the name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # what a latent does to later ones fades: otherwise the smallest difference grows with every frame
    (r"^model\.audio_latent_proj\.weight", 0.25),
    (r"^flow_head\.(cond_proj|final_layer\.proj)\.weight", 0.5),
    (r"^model\..*\.(q|k|o)_proj\.weight", 1.5),
    (r"^eos_head\.weight", 2.0),
)
_BIAS_STD = 0.05
_LOUD = 0.1
"""Rms of the samples of random latents."""
_RARE = 2.2
"""How far the threshold lies above the mean stop score, whose standard deviation is 2."""
_TRANSPOSED = r"upsample\.conv\.weight$|decoder_seanet\.layers\.(2|5|8)\.conv\.weight$"


def make_model(config: dict[str, Any], seed: int) -> PocketTTSForConditionalGeneration:
    """The library's language model with random weights, float32, the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = PocketTTSForConditionalGeneration(PocketTTSConfig(**config)).eval()
    state = _drawn(model, torch.Generator().manual_seed(seed))
    state["eos_head.bias"] = torch.tensor([THRESHOLD - _RARE])
    model.load_state_dict(state)
    return model


def make_codec(config: dict[str, Any], seed: int) -> PocketTTSAudioTokenizerModel:
    """The audio tokenizer with random weights, float32; random latents sound as loud as speech."""
    with torch.random.fork_rng(devices=[]):
        codec = PocketTTSAudioTokenizerModel(PocketTTSAudioTokenizerConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    codec.load_state_dict(_drawn(codec, generator))
    latents = torch.randn(1, 25, config["latent_dim"], generator=generator)
    last = codec.decoder.decoder_seanet.layers[-1].conv
    with torch.no_grad():
        last.bias.zero_()
        samples = codec.decode(latents).audio_values
        last.weight.mul_(_LOUD / samples.square().mean().sqrt())
    return codec


def make_voice(frames: int, width: int, seed: int) -> torch.Tensor:
    """[frames, width] latents of no recording."""
    return torch.randn(frames, width, generator=torch.Generator().manual_seed(seed))


def _drawn(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: _scaled(name, state[name], generator) for name in sorted(state)}


def _scaled(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if name.endswith(("freqs", "latent_stats_num_updates")) or name.startswith("loss_weighting."):
        return like  # fixed, or of training only
    noise = torch.randn(like.shape, generator=generator)
    if name == "latent_std":
        return 1.0 + 0.2 * noise.abs()
    if name.endswith("bias"):
        return _BIAS_STD * noise
    if name.endswith("layer_scale.scale"):
        return 0.5 + 0.1 * noise
    if name.endswith(("embed_tokens.weight", "bos_latent", "latent_mean")):
        return noise
    if noise.ndim == 1:
        return 1.0 + 0.1 * noise  # norms
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(_fan_in(name, noise)) * noise


def _fan_in(name: str, noise: torch.Tensor) -> int:
    if re.search(r"upsample\.conv\.weight$", name):  # depthwise and transposed: two taps per sample
        return 2
    if re.search(_TRANSPOSED, name):  # [in, out, kernel]
        return noise.shape[0] * 2
    return noise[0].numel()
