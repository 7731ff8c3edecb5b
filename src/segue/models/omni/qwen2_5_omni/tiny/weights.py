"""Draw random weights under which every branch of the networks carries signal of order one.

Default initialisation tests nothing in a server: the waveform is silent, blocks do not influence each other, greedy
decoding loops and never ends. Here each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as
inputs, and the gains below were chosen by measurement (the tests of the tiny preset state the targets).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()

from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration  # noqa: E402

# (pattern of the published name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # sharp attention over the whole context: otherwise the next token depends only on the last one, and decoding loops
    (r"thinker\.model\.layers\.\d+\.self_attn\.[qk]_proj\.weight", 2.2),
    (r"thinker\.model\.layers\.\d+\.self_attn\.o_proj\.weight", 4.0),
    (r"talker\.model\.layers\.\d+\.self_attn\.[qk]_proj\.weight", 3.0),
    (r"talker\.model\.layers\.\d+\.self_attn\.o_proj\.weight", 6.0),
    # media rows as large as text embeddings
    (r"thinker\.audio_tower\.proj\.weight", 1.0),
    (r"thinker\.visual\.merger\.mlp\.2\.weight", 1.5),
    # makes the flow's velocity produce mel spectra of the usual range
    (r"dit_model\.proj_out\.weight", 2.0),
    (r"dit_model\.transformer_blocks\.\d+\.attn\.to_[qk]\.weight", 1.5),
    (r"dit_model\.transformer_blocks\.\d+\.attn\.to_out\.", 2.0),
    (r"dit_model\.input_embed\.spk_encoder\.", 1.4),
    (r"bigvgan_model\.conv_pre\.weight", 3.0),
    (r"bigvgan_model\.resblocks\.\d+\.convs2\.", 0.5),
    (r"bigvgan_model\.conv_post\.weight", 0.05),
)
_BIAS_STD = 0.05
_MEL_MEAN = -4.0
"""Log-mel spectra of speech range from -11.5 to 2: the flow's last bias moves them there."""


@dataclass(frozen=True)
class EndGains:
    """How easily sequences end: a head row k times as large as the others wins more steps the larger k is."""

    thinker: float
    """Gain of the thinker's end token."""
    talker: float
    """Gain of the talker's end token."""
    after_text: float
    """Weight of "the text is over" in the talker's end token."""


def published_name(name: str) -> str:
    """Map a parameter of the installed `Qwen2_5OmniForConditionalGeneration` to its name in published checkpoints."""
    name = name.replace("thinker.model.language_model.", "thinker.model.")
    return re.sub(r"^thinker\.model\.(visual|audio_tower)\.", r"thinker.\1.", name)


def shapes_of(config: dict[str, Any]) -> dict[str, torch.Size]:
    """Published name → shape of every parameter, from a model on the meta device."""
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**config))
    return {published_name(name): tensor.shape for name, tensor in model.state_dict().items()}


def make_weights(
    config: dict[str, Any], speakable: list[int], newline: int, ends: EndGains, seed: int
) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, float32, the same for the same arguments.

    `speakable`: token ids that greedy decoding may emit (the end token is added); all other head rows are zero.
    `newline`: id of the token that ends every chat prompt.
    """
    weights = dict(_draw(shapes_of(config), seed))
    thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]
    _shape_head(weights["thinker.lm_head.weight"], speakable, thinker["eos_token_id"], ends.thinker)
    codes = min(talker["tts_codec_pad_token_id"], config["token2wav_config"]["dit_config"]["num_embeds"])
    _shape_head(weights["talker.codec_head.weight"], list(range(codes)), talker["tts_codec_end_token_id"], ends.talker)
    _mark_end_of_text(weights, talker, ends.after_text)
    _say_something(weights, thinker, newline)
    bias = weights["token2wav.code2wav_dit_model.proj_out.bias"]
    bias += _MEL_MEAN
    post = weights["token2wav.code2wav_bigvgan_model.conv_post.weight"]
    post -= post.mean(dim=-1, keepdim=True)  # no constant offset in the waveform
    return weights


def _shape_head(head: torch.Tensor, allowed: list[int], end: int, end_gain: float) -> None:
    keep = torch.zeros(head.shape[0], 1)
    keep[allowed] = 1.0
    keep[end] = end_gain
    head *= keep


def _mark_end_of_text(weights: dict[str, torch.Tensor], talker: dict[str, Any], after_text: float) -> None:
    """Make the talker end soon after its text: channel 0 carries "the text is over" from the pad embedding (the
    talker's input from then on) straight to the end token's logit; nothing else reads or writes this channel."""
    weights["thinker.model.embed_tokens.weight"][:, 0] = 0.0
    weights["thinker.model.embed_tokens.weight"][talker["tts_text_pad_token_id"], 0] = 4.0
    weights["thinker.model.norm.weight"][0] = 0.0  # the reply rows are hidden state + embedding
    weights["talker.model.embed_tokens.weight"][:, 0] = 0.0
    project = weights["talker.thinker_to_talker_proj.weight"]
    project[0] = 0.0
    project[:, 0] = 0.0
    project[0, 0] = 1.0
    weights["talker.thinker_to_talker_proj.bias"][0] = 0.0
    for layer in range(talker["num_hidden_layers"]):
        weights[f"talker.model.layers.{layer}.self_attn.o_proj.weight"][0] = 0.0
        weights[f"talker.model.layers.{layer}.mlp.down_proj.weight"][0] = 0.0
    weights["talker.codec_head.weight"][:, 0] = 0.0
    weights["talker.codec_head.weight"][talker["tts_codec_end_token_id"], 0] = after_text


def _say_something(weights: dict[str, torch.Tensor], thinker: dict[str, Any], newline: int) -> None:
    """Prevent a reply from ending with its first token: channel 1 tells the end token that the reply has not begun."""
    weights["thinker.model.embed_tokens.weight"][:, 1] = 0.0
    weights["thinker.model.embed_tokens.weight"][newline, 1] = 4.0
    for layer in range(thinker["num_hidden_layers"]):
        weights[f"thinker.model.layers.{layer}.self_attn.o_proj.weight"][1] = 0.0
        weights[f"thinker.model.layers.{layer}.mlp.down_proj.weight"][1] = 0.0
    weights["thinker.lm_head.weight"][:, 1] = 0.0
    weights["thinker.lm_head.weight"][thinker["eos_token_id"], 1] = -8.0


def _draw(shapes: dict[str, torch.Size], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(shapes):
        shape = shapes[name]
        noise = torch.randn(shape, generator=generator)
        yield name, _scaled(name, noise)


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith((".act.alpha", ".act.beta")):
        return 0.3 * noise  # log of frequency and magnitude
    if name.endswith("bias"):
        return _BIAS_STD * noise
    if name.endswith("codec_embed.weight"):
        return 2.0 * noise  # a few of many inputs of the flow: large enough to have an audible effect
    if name.endswith(("embed_tokens.weight", "audio_bos_eos_token.weight")):
        return noise
    if noise.ndim == 1:
        return 1.0 + 0.1 * noise  # norms
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    fan_in = noise[0].numel()
    if ".ups." in name:  # transposed: [in, out, kernel], and a sample sees kernel / stride taps
        fan_in = noise.shape[0] * 2
    return gain / math.sqrt(fan_in) * noise
