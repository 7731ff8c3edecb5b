"""Making small pipelines: random weights that behave, and the files of the published layout.

Default initialisation proves nothing: pictures are grey, blocks add next to nothing and the prompt does not matter.
Here matrices have entries of std gain / sqrt(fan in), and the last layers are scaled by measurement (`scale_to`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from segue.models.diffusion.library import VERSION
from segue.models.registry import PIPELINE
from segue.models.tiny.files import added_tokens, write_json

Part = tuple[str | None, str | None]
"""(library, class); both None for a part that is left out."""


@dataclass(frozen=True)
class RopeSize:
    """One size of a denoiser whose positions are rotations along three axes."""

    layers: int
    heads: int
    rope: tuple[int, int, int]
    """Dimensions of a head for each axis."""

    @property
    def head(self) -> int:
        return sum(self.rope)


def write_index(directory: Path, pipeline: str, parts: Mapping[str, Part], **settings: Any) -> None:
    """`model_index.json`: `parts` by name ."""
    named = {name: list(part) for name, part in sorted(parts.items())}
    write_json(directory, PIPELINE, {"_class_name": pipeline, "_diffusers_version": VERSION, **settings, **named})


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, special: tuple[str, ...], kind: str, *, longest: int, **more: Any
) -> None:
    """The folder of a tokenizer of the class `kind` of transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {
        "added_tokens_decoder": added_tokens(tokenizer, special),
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "tokenizer_class": kind,
        **more,
    }
    write_json(directory, "tokenizer_config.json", values)


def randomise(network: nn.Module, seed: int, gains: Mapping[str, float] | None = None) -> None:
    """Draw all weights anew, in the order of their names: the same for the same seed.

    `gains`: by pattern of a parameter's name; the first that is found in it counts, 1.0 where none is. What scales
    (norms: one number per channel) stays near 1, what is added near 0.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            gain = next((gain for pattern, gain in (gains or {}).items() if re.search(pattern, name)), 1.0)
            if id(parameter) in embeddings:
                parameter.copy_(gain * noise)
            elif parameter.numel() > max(parameter.shape):
                fan_in = math.prod(parameter.shape[1:])
                parameter.copy_(noise * gain / math.sqrt(fan_in))
            elif name.endswith(("weight", "gamma")):
                parameter.copy_(gain * (1.0 + 0.1 * noise))
            else:
                parameter.copy_(0.05 * noise)


@torch.no_grad()
def scale_to(std: float, layer: nn.Module, measure: Callable[[], torch.Tensor]) -> None:
    """Scale a last layer, so that what `measure` gives has this standard deviation and a mean of about 0."""
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    bias.zero_()
    weight.mul_(std / measure().std())
