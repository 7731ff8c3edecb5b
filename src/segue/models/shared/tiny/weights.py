"""Draw random weights that behave, for any language model of transformers: outputs depend on all inputs.

Default initialisation tests nothing in a server: greedy decoding loops on one token and never ends. Here matrices have
entries of std gain / sqrt(fan in); the gains were chosen by measurement (the tests of the tiny presets state the
targets).
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from segue.models.shared.library import PreTrainedModel

# (pattern of the parameter's name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # sharp attention over the whole context: otherwise the next token depends only on the last one, and decoding loops
    (r"\.[qk]_proj\.weight$", 2.2),
    (r"\.(qkv_proj|c_attn|query_key_value)\.weight$", 2.0),
    (r"\.(o_proj|out_proj|attn\.c_proj|attention\.dense)\.weight$", 4.0),
    (r"\.(router|gate)\.weight$", 2.0),
)
_NORM_GAINS = (
    (r"\.[qk]_norm\.weight$", 2.2),  # with q/k norm, the gain of the q and k matrices has no effect
    # norms after a layer (Gemma 3, OLMo 2): the layer's output outweighs the token's own embedding
    (r"\.post_(attention|feedforward|self_attn|mlp)_(layer)?norm\.weight$", 2.5),
)
_HEAD_GAIN = 3.0
"""Gain of the head, so that the most likely token stands out of a large vocabulary."""
_BIAS_STD = 0.05


def randomise(model: PreTrainedModel, seed: int, *, embedding_std: float = 1.0) -> None:
    """Redraw all weights, in the order of their names: equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(embedding_std * noise)
            elif parameter.ndim > 1:
                fan_in = math.sqrt(math.prod(parameter.shape[1:])) if parameter.ndim > 2 else _fan_in(model, name)
                parameter.copy_(noise * _gain(_GAINS, name) / math.sqrt(fan_in))
            elif re.search(r"(?i)(norm|ln_\w+)\.weight$", name):
                # the library initialises norms to the identity: 1, or 0 if the module adds 1
                gain = _gain(_NORM_GAINS, name)
                parameter.copy_(parameter + (gain - 1.0) + 0.1 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            else:
                parameter.copy_(_BIAS_STD * noise)


def prefer(model: PreTrainedModel, speakable: list[int], end: int, end_gain: float) -> None:
    """Shape the head so that greedy replies end by themselves and, with an untied head, are readable."""
    head = model.get_output_embeddings()
    assert head is not None
    rows = torch.ones(head.weight.shape[0], 1)
    if head.weight is not model.get_input_embeddings().weight:
        rows.zero_()
        rows[speakable] = _HEAD_GAIN
        rows[end] = _HEAD_GAIN
    rows[end] *= end_gain
    with torch.no_grad():
        head.weight.mul_(rows)


def _fan_in(model: PreTrainedModel, name: str) -> int:
    module, _, _ = name.rpartition(".")
    weight = model.get_parameter(name)
    return weight.shape[1] if isinstance(model.get_submodule(module), nn.Linear) else weight.shape[0]


def _gain(gains: tuple[tuple[str, float], ...], name: str) -> float:
    return next((gain for pattern, gain in gains if re.search(pattern, name)), 1.0)
