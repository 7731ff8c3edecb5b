"""Draw random weights under which every branch of the networks carries signal of order one.

Each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as inputs; the gains were chosen by
measurement (the tests of the tiny preset state the targets).
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from segue.models.speech.csm.library import CsmConfig, CsmForConditionalGeneration
from segue.models.speech.csm.tiny.config import END

# (pattern of the name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # sharp attention over the whole context: otherwise the next row depends only on the last one, and decoding loops
    (r"^(backbone_model|depth_decoder\.model)\..*\.[qk]_proj\.weight", 2.2),
    (r"^(backbone_model|depth_decoder\.model)\..*\.o_proj\.weight", 5.0),
    (r"^(lm_head|depth_decoder\.codebooks_head)\.weight", 2.0),
    (r"^codec_model\..*\.[qk]_proj\.weight", 1.5),
)
_BIAS_STD = 0.05
_LOUD = 0.1
"""Rms of the samples of random codes."""
_END_GAIN = 1.5
"""How easily an utterance ends: a head row k times as large as the others wins more steps the larger k is."""
_TIED = "depth_decoder.model.embed_tokens.weight"
_OTHER = "backbone_model.embed_tokens.embed_audio_tokens.weight"


def make_model(config: dict[str, Any], seed: int) -> CsmForConditionalGeneration:
    """The library's model with random weights, float32, the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = CsmForConditionalGeneration(CsmConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    weights = {name: _scaled(name, torch.randn(state[name].shape, generator=generator)) for name in sorted(state)}
    _end_together(weights, config["codec_config"]["codebook_size"], config["vocab_size"])
    weights[_OTHER] = weights[_TIED]
    model.load_state_dict(weights)
    _set_volume(model, generator)
    return model


def _end_together(weights: dict[str, torch.Tensor], codebook: int, vocab: int) -> None:
    """Make a row that begins with the end's code have it in all codebooks: in the depth decoder, channel 0 carries "the
    code before is the end's" from its embedding to the heads; nothing else writes it. Ids that the codec does not have
    are never the likeliest."""
    embedding = weights[_TIED]
    embedding[:, 0] = 0.0
    embedding[END::vocab, 0] = 8.0
    projector = weights["depth_decoder.model.inputs_embeds_projector.weight"]
    projector[:, 0] = 0.0
    projector[0] = 0.0
    projector[0, 0] = 1.0
    for name, weight in weights.items():
        if re.search(r"^depth_decoder\.model\.layers\.\d+\..*(o_proj|down_proj)\.weight$", name):
            weight[0] = 0.0
    heads = weights["depth_decoder.codebooks_head.weight"]
    heads[:, 0] = 0.0
    heads[:, :, END] *= 0.5
    heads[:, 0, END] = 16.0
    heads[:, :, codebook:] = 0.0
    head = weights["lm_head.weight"]
    head[END] *= _END_GAIN
    head[codebook:] = 0.0


def _set_volume(model: CsmForConditionalGeneration, generator: torch.Generator) -> None:
    """Scale the codec's last layer."""
    codec = model.config.codec_config
    codes = torch.randint(0, codec.codebook_size, (1, codec.num_quantizers, 25), generator=generator)
    convs = [module for module in model.codec_model.modules() if isinstance(module, torch.nn.Conv1d)]
    [last] = [conv for conv in convs if conv.out_channels == 1]
    with torch.no_grad():
        assert last.bias is not None
        last.bias.zero_()
        samples = model.codec_model.decode(codes, return_dict=True).audio_values
        last.weight.mul_(_LOUD / samples.square().mean().sqrt())


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith((".initialized", ".cluster_usage")):
        return torch.ones_like(noise)
    if name.endswith("bias"):
        return _BIAS_STD * noise
    if name.endswith("layer_scale.scale"):
        return 0.5 + 0.1 * noise
    if re.search(r"embed(_text|_audio)?_tokens\.weight$|embed_sum$", name):
        return noise
    if noise.ndim == 1:
        return 1.0 + 0.1 * noise  # norms
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(_fan_in(name, noise)) * noise


def _fan_in(name: str, noise: torch.Tensor) -> int:
    if name.endswith("codebooks_head.weight"):  # [codebooks, in, out]
        return noise.shape[1]
    if re.search(r"upsample\.conv\.weight$", name):  # depthwise and transposed: two taps per sample
        return 2
    if re.search(r"decoder(_seanet)?\.layers\.(2|5|8|11)\.conv\.weight$", name):  # transposed: [in, out, kernel]
        return noise.shape[0] * 2
    return noise[0].numel()
