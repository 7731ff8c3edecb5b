"""Draw random weights under which every branch of the networks carries signal of order one.

Each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as inputs; the gains were chosen by
measurement (the tests of the tiny preset state the targets).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

# (pattern of the published name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # sharp attention over the whole context: otherwise the next token depends only on the last one, and decoding loops
    (r"(thinker|talker)\.model\.layers\.\d+\.self_attn\.o_proj\.weight", 6.0),
    (r"talker\.code_predictor\.model\.layers\.\d+\.self_attn\.o_proj\.weight", 3.0),
    (r"talker\.code_predictor\.lm_head\.\d+\.weight", 2.0),
    (r"\.mlp\.gate\.weight", 2.0),
    (r"\.mlp\.experts\.\d+\.down_proj\.weight", 2.0),
    # media rows as large as text embeddings
    (r"thinker\.visual\.merger(_list\.\d+)?\.mlp\.2\.weight", 2.5),
    (r"thinker\.audio_tower\.conv2d\d\.weight", 2.0),
    (r"thinker\.audio_tower\.proj2\.weight", 2.0),
    (r"code2wav\.decoder\.\d+\.block\.\d+\.conv2\.", 0.5),
    (r"code2wav\.decoder\.6\.conv\.weight", 0.02),
)
_BIAS_STD = 0.05
_SHARP = 2.8
"""Mean of q/k norms: with them, the gain of the q and k matrices has no effect."""
_END_GAIN = 1.5
"""How easily a reply ends: a head row k times as large as the others wins more steps the larger k is."""

_END_OF_SPEECH_GAIN = 1.4
"""The same for the talker's end token."""
_AFTER_TEXT = 2.0
"""Weight of "the text is over" in the talker's end token."""


def published(name: str, shape: torch.Size) -> Iterator[tuple[str, torch.Size]]:
    """A parameter of the installed library's model → names and shapes of its tensors in published checkpoints."""
    name = name.replace("thinker.model.language_model.", "thinker.model.")
    name = re.sub(r"^thinker\.model\.(visual|audio_tower)\.", r"thinker.\1.", name)
    experts, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        for expert in range(shape[0]):
            for half in ("gate_proj", "up_proj"):
                yield f"{experts}.{expert}.{half}.weight", torch.Size((shape[1] // 2, shape[2]))
    elif part == "down_proj":
        for expert in range(shape[0]):
            yield f"{experts}.{expert}.down_proj.weight", shape[1:]
    else:
        yield name, shape


def shapes_of(config: dict[str, Any]) -> dict[str, torch.Size]:
    """Published name → shape of every parameter, from a model on the meta device."""
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**config))
    return dict(pair for name, tensor in model.state_dict().items() for pair in published(name, tensor.shape))


def make_weights(config: dict[str, Any], speakable: list[int], newline: int, seed: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, float32, the same for the same arguments.

    `speakable`: token ids that greedy decoding may emit (the end token is added); all other head rows are zero.
    `newline`: id of the token that ends every chat prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes_of(config)
    weights = {name: _scaled(name, torch.randn(shapes[name], generator=generator)) for name in sorted(shapes)}
    end = config["im_end_token_id"]
    keep = torch.zeros(shapes["thinker.lm_head.weight"][0], 1)
    keep[speakable] = 1.0
    keep[end] = _END_GAIN
    weights["thinker.lm_head.weight"] *= keep
    _say_something(weights, newline, end)
    talker = config["talker_config"]
    keep = torch.zeros(shapes["talker.codec_head.weight"][0], 1)
    keep[: config["code2wav_config"]["codebook_size"]] = 1.0
    keep[talker["codec_eos_token_id"]] = _END_OF_SPEECH_GAIN
    weights["talker.codec_head.weight"] *= keep
    _mark_end_of_text(weights, config["tts_pad_token_id"], talker["codec_bos_id"], talker["codec_eos_token_id"])
    return weights


def _say_something(weights: dict[str, torch.Tensor], newline: int, end: int) -> None:
    """Prevent a reply from ending with its first token: channel 1 tells the end token that the reply has not begun."""
    weights["thinker.model.embed_tokens.weight"][:, 1] = 0.0
    weights["thinker.model.embed_tokens.weight"][newline, 1] = 4.0
    for name, weight in weights.items():
        if re.fullmatch(r"thinker\.model\.layers\.\d+\.(self_attn\.o_proj|mlp\.experts\.\d+\.down_proj)\.weight", name):
            weight[1] = 0.0
    weights["thinker.lm_head.weight"][:, 1] = 0.0
    weights["thinker.lm_head.weight"][end, 1] = -8.0


def _mark_end_of_text(weights: dict[str, torch.Tensor], pad: int, begin: int, end: int) -> None:
    """Make the talker end soon after its text, and not before it: channel 0 carries "the text is over" from the pad's
    embedding (the talker's input from then on) through the text projection to the end token's logit, channel 1 "no
    code yet" from the codec's first token; nothing else writes them."""
    weights["thinker.model.embed_tokens.weight"][:, 0] = 0.0
    weights["thinker.model.embed_tokens.weight"][pad, 0] = 4.0
    first, second = (weights[f"talker.text_projection.linear_fc{layer}.weight"] for layer in (1, 2))
    first[0] = 0.0
    first[:, 0] = 0.0
    first[0, 0] = 1.0
    second[:2] = 0.0
    second[0, 0] = 1.0
    weights["talker.text_projection.linear_fc1.bias"][0] = 0.0
    weights["talker.hidden_projection.linear_fc2.weight"][:2] = 0.0
    for name in ("text", "hidden"):
        weights[f"talker.{name}_projection.linear_fc2.bias"][:2] = 0.0
    for name, weight in weights.items():
        if re.search(r"^talker\.(model|code_predictor\.model)\.codec_embedding(\.\d+)?\.weight$", name):
            weight[:, :2] = 0.0
        if re.search(r"^talker\.model\.layers\.\d+\..*(o_proj|down_proj)\.weight$", name):
            weight[:2] = 0.0
    weights["talker.model.codec_embedding.weight"][begin, 1] = 4.0
    weights["talker.codec_head.weight"][:, :2] = 0.0
    weights["talker.codec_head.weight"][end, 0] = _AFTER_TEXT
    weights["talker.codec_head.weight"][end, 1] = -8.0


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith((".alpha", ".beta")):
        return 0.3 * noise  # log of frequency and magnitude
    if name.endswith("bias"):
        return _BIAS_STD * noise
    if name.endswith((".gamma", "layer_scale.scale")):
        return 0.5 + 0.1 * noise
    if re.search(r"(embed_tokens|(codec|code)_embedding(\.\d+)?|pos_embed)\.weight$", name):
        return noise
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return _SHARP + 0.1 * noise
    if noise.ndim == 1:
        return 1.0 + 0.1 * noise  # norms
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(_fan_in(name, noise)) * noise


def _fan_in(name: str, noise: torch.Tensor) -> int:
    if re.search(r"code2wav\.upsample\.\d+\.0\.conv", name):  # transposed: [in, out, kernel], one tap per sample
        return noise.shape[0]
    if re.search(r"code2wav\.decoder\.\d+\.block\.1\.conv", name):  # two taps per sample
        return noise.shape[0] * 2
    return noise[0].numel()
