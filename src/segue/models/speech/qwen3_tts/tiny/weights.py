"""Draw random weights under which every branch of the networks carries signal of order one.

Each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as inputs; the gains were chosen by
measurement (the tests of the tiny preset state the targets).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from segue.models.speech.qwen3_tts.config import config_of
from segue.models.speech.qwen3_tts.library import MimiConfig, MimiModel
from segue.models.speech.qwen3_tts.loading import talker_name, vocoder_name
from segue.models.speech.qwen3_tts.networks import CodesToWave, TalkerNet
from segue.models.speech.qwen3_tts.tiny.config import CODEBOOK, END

# (pattern of the published name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # sharp attention over the whole context: otherwise the next token depends only on the last one, and decoding loops
    (r"^talker\.model\.layers\.\d+\.self_attn\.o_proj\.weight", 6.0),
    (r"^talker\.code_predictor\.model\.layers\.\d+\.self_attn\.o_proj\.weight", 3.0),
    (r"^talker\.code_predictor\.lm_head\.\d+\.weight", 2.0),
    (r"^talker\.text_projection\.linear_fc2\.weight", 3.0),
    (r"^decoder\.decoder\.\d+\.block\.\d+\.conv2\.", 0.5),
    (r"^decoder\.decoder\.6\.conv\.weight", 0.02),
)
_BIAS_STD = 0.05
_SHARP = 2.8
"""Mean of q/k norms: with them, the gain of the q and k matrices has no effect."""
_END_GAIN = 1.2
"""How easily an utterance ends: a head row k times as large as the others wins more steps the larger k is."""
_SHARE_GAIN = 20.0
"""How much the share of generated positions favours the end."""
_UNUSED_ENCODER = ("upsample.", "decoder.", "decoder_transformer.")
"""Parts of Mimi that the speech tokenizer's encoder does not have."""


def make_talker(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of `model.safetensors`, float32, the same for the same arguments."""
    with torch.device("meta"):
        net = TalkerNet(config_of(config, "config.json").talker_config)
    shapes = {talker_name(name): tensor.shape for name, tensor in net.state_dict().items()}
    weights = _drawn(shapes, seed)
    keep = torch.zeros(shapes["talker.codec_head.weight"][0], 1)
    keep[:CODEBOOK] = 1.0
    keep[END] = _END_GAIN
    weights["talker.codec_head.weight"] *= keep
    _end_in_proportion(weights, config["talker_config"]["head_dim"])
    return weights


def _end_in_proportion(weights: dict[str, torch.Tensor], head_dim: int) -> None:
    """Make longer prompts end later: greedy decoding of few codes would loop. Channel 1 marks codes; the first head of
    the first layer, whose queries are zero, takes the mean of it over all positions to channel 0, from which the end
    token's logit grows with the share of generated positions. Nothing else writes these channels."""
    for name, weight in weights.items():
        if re.search(r"^talker\.(model|code_predictor\.model)\.codec_embedding(\.\d+)?\.weight$", name):
            weight[:, :2] = 0.0
        if re.search(r"^talker\.model\.layers\.\d+\..*(o_proj|down_proj)\.weight$", name):
            weight[:2] = 0.0
    for part in ("weight", "bias"):
        weights[f"talker.text_projection.linear_fc2.{part}"][:2] = 0.0
    weights["talker.model.codec_embedding.weight"][:CODEBOOK, 1] = 4.0
    attention = "talker.model.layers.0.self_attn"
    weights[f"{attention}.q_proj.weight"][:head_dim] = 0.0
    weights[f"{attention}.v_proj.weight"][0] = 0.0
    weights[f"{attention}.v_proj.weight"][0, 1] = 1.0
    weights[f"{attention}.o_proj.weight"][0, 0] = _SHARE_GAIN
    weights["talker.codec_head.weight"][:, :2] = 0.0
    weights["talker.codec_head.weight"][END, 0] = 1.0


def make_speech_tokenizer(config: dict[str, Any], decoder: Any, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of `speech_tokenizer/model.safetensors`, float32. `config`: its `config.json`; `decoder`: the same's
    `decoder_config` as a value."""
    with torch.device("meta"):
        net = CodesToWave(decoder)
        encoder = MimiModel(MimiConfig(**config["encoder_config"]))
    shapes = {vocoder_name(name): tensor.shape for name, tensor in net.state_dict().items()}
    for part in ("rvq_first", "rvq_rest"):  # only training uses them
        outputs, inputs, _ = shapes[f"decoder.quantizer.{part}.output_proj.weight"]
        shapes[f"decoder.quantizer.{part}.input_proj.weight"] = torch.Size((inputs, outputs, 1))
    for name, tensor in encoder.state_dict().items():
        name = re.sub(r"^encoder\.(?=encoder_|downsample)", "", name).replace("encoder_seanet.", "encoder.")
        if not name.startswith(_UNUSED_ENCODER):
            shapes[f"encoder.{name}"] = tensor.shape
    return _drawn(shapes, seed)


def _drawn(shapes: Mapping[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: _scaled(name, torch.randn(shapes[name], generator=generator)) for name in sorted(shapes)}


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith((".alpha", ".beta")):
        return 0.3 * noise  # log of frequency and magnitude
    if name.endswith("bias"):
        return _BIAS_STD * noise
    if name.endswith((".gamma", "layer_scale.scale")):
        return 0.5 + 0.1 * noise
    if name.endswith("cluster_usage"):
        return 1.0 + noise.abs()
    if re.search(r"(_embedding(\.\d+)?\.weight|embedding_sum|embed_sum)$", name):
        return noise
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return _SHARP + 0.1 * noise
    if noise.ndim < 2:
        return 1.0 + 0.1 * noise  # norms
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(_fan_in(name, noise)) * noise


def _fan_in(name: str, noise: torch.Tensor) -> int:
    if re.search(r"^decoder\.upsample\.\d+\.0\.conv", name):  # transposed: [in, out, kernel], one tap per sample
        return noise.shape[0]
    if re.search(r"^decoder\.decoder\.\d+\.block\.1\.conv", name):  # two taps per sample
        return noise.shape[0] * 2
    return noise[0].numel()
