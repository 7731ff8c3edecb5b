"""Draw random weights under which every branch of the networks carries signal of order one.

Each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as inputs; the gains were chosen by
measurement (the tests of the family state the targets).
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from segue.models.speech.higgs_audio_v2.library import (
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2TokenizerConfig,
)
from segue.models.speech.higgs_audio_v2.loading import DecoderHalf

# (pattern of the name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # sharp attention over the whole context: otherwise the next row depends only on the last one, and decoding loops
    (r"[qk]_proj\.weight$", 2.2),
    (r"o_proj\.weight$", 5.0),
    (r"^audio_lm_head\.weight$", 2.0),
)
_BIAS_STD = 0.05
_LOUD = 0.1
"""Rms of the samples of random codes."""
_END_GAIN = 1.5
"""How easily an utterance ends: a head row k times as large as the others wins more steps the larger k is."""
_ROW = "model.embed_audio_tokens.embed_audio_tokens.weight"
_HEAD = "audio_lm_head.weight"


def make_model(config: dict[str, Any], seed: int) -> HiggsAudioV2ForConditionalGeneration:
    """The library's language model with random weights, float32, the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = HiggsAudioV2ForConditionalGeneration(HiggsAudioV2Config(**config)).eval()
    weights = _drawn(model, seed)
    weights[_ROW] /= math.sqrt(config["num_codebooks"])  # a row is the sum of its codes
    # only codebook 0 begins the end, so that utterances are not too short
    heads = weights[_HEAD].view(config["num_codebooks"], config["codebook_size"], -1)
    heads[0, config["audio_stream_eos_id"]] *= _END_GAIN
    heads[1:, config["audio_stream_eos_id"]] = 0.0
    heads[:, config["audio_stream_bos_id"]] = 0.0
    model.load_state_dict(weights)
    return model


def make_codec(config: dict[str, Any], seed: int) -> DecoderHalf:
    """The decoder of the codec with random weights, float32, the same for the same arguments."""
    read = HiggsAudioV2TokenizerConfig(**config)
    with torch.random.fork_rng(devices=[]):
        codec = DecoderHalf(read).eval()
    codec.load_state_dict(_drawn(codec, seed))
    codes = torch.randint(
        0, read.codebook_size, (1, read.num_quantizers, 25), generator=torch.Generator().manual_seed(seed)
    )
    last: Any = codec.acoustic_decoder.conv2
    with torch.no_grad():
        last.bias.zero_()
        last.weight.mul_(_LOUD / codec(codes).square().mean().sqrt())
    return codec


def _drawn(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = module.state_dict()
    return {name: _scaled(name, state[name], generator) for name in sorted(state)}


def _scaled(name: str, own: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("audio_tokens_offsets"):
        return own
    noise = torch.randn(own.shape, generator=generator)
    if name.endswith((".inited", ".cluster_size")):
        return torch.ones_like(noise)
    if name.endswith("bias"):
        return _BIAS_STD * noise
    if re.search(r"embed(_audio)?_tokens\.weight$|\.embed(_avg)?$", name):
        return noise
    if noise.ndim == 1 or name.endswith("alpha"):
        return 1.0 + 0.1 * noise  # norms, and the frequencies of snake activations
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    # transposed: [in, out, kernel], two taps per sample
    fan_in = noise.shape[0] * 2 if name.endswith("conv_t1.weight") else noise[0].numel()
    return gain / math.sqrt(fan_in) * noise
