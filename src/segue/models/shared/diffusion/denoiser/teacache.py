"""TeaCache: the signal of its rule in each kind of network, and its published polynomials (Liu et al., "Timestep
Embedding Tells: It's Time to Cache for Video Diffusion Model", arXiv 2411.19108).

A call changes the prediction about as much as the timestep embedding changes the first block's input. The rule takes
the relative L1 change of that input (eq. 5), applies a polynomial fitted for the model (section 3.3), and sums over
calls; while the sum is below a threshold (eq. 7), all blocks are skipped and their last residual is added instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import nn

from segue.engines.diffusion.contract import DenoiserContext
from segue.messages.diffusion import FIRST_BLOCK, TAYLORSEER, TEACACHE
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.shared.diffusion.library import (
    FluxTransformerBlock,
    JointTransformerBlock,
    QwenImageTransformerBlock,
    WanTransformerBlock,
)
from segue.models.shared.diffusion.loading import pipeline_index

OPTION = "teacache_coefficients"
"""Option of a denoiser's stage: the polynomial's coefficients, the highest power's first."""
_THRESHOLD = 0.1
"""Default threshold if that option is set."""


@dataclass(frozen=True, slots=True)
class TeaCache:
    """The TeaCache rule for one network."""

    coefficients: Sequence[float]
    """Coefficients of the polynomial, the highest power's first."""
    threshold: float
    """The default threshold: the most conservative that the authors measured."""
    first: int = 1
    """Number of a sample's first calls that are always computed."""
    last: int = 1
    """Number of its last calls that are always computed."""

    def rescaled(self, change: float) -> float:
        """Evaluate the polynomial (Horner's scheme)."""
        value = 0.0
        for coefficient in self.coefficients:
            value = value * change + coefficient
        return value

    def always(self, step: int, steps: int) -> bool:
        """Whether a sample's call number `step` (from 0) of `steps` is computed regardless of the change."""
        return step < self.first or step >= steps - self.last


PUBLISHED: Mapping[str, TeaCache] = {
    "FLUX.1": TeaCache((4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01), 0.25),
    "Wan2.1-T2V-1.3B": TeaCache(
        (-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02), 0.05, 5, 0
    ),
    "Wan2.1-T2V-14B": TeaCache(
        (-3.03318725e05, 4.90537029e04, -2.65530556e03, 5.87365115e01, -3.15583525e-01), 0.14, 5, 0
    ),
}
"""From the authors' programs (github.com/ali-vilab/TeaCache; Wan with `--use_ret_steps`)."""
_WAN = {1536: "Wan2.1-T2V-1.3B", 5120: "Wan2.1-T2V-14B"}
"""Checkpoint names by network width."""

Signal = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""(first block, hidden states [rows, tokens, features], timestep embedding) → [rows, …], the compared tensor."""


@singledispatch
def signal_of(block: nn.Module) -> Signal:
    """The signal for a kind of block. Raises `InvalidRequest` if the kind is not registered."""
    raise InvalidRequest(
        f"step_cache is {TEACACHE!r}, which is not known for {type(block).__name__}; this model "
        f"has {FIRST_BLOCK} and {TAYLORSEER}",
        field="step_cache",
    )


@signal_of.register(FluxTransformerBlock)
@signal_of.register(JointTransformerBlock)
def _of_norm(block: nn.Module) -> Signal:
    return _modulated


@signal_of.register(QwenImageTransformerBlock)
def _of_image(block: nn.Module) -> Signal:
    return modulated_by_image


@signal_of.register(WanTransformerBlock)
def _of_embedding(block: nn.Module) -> Signal:
    return _embedding


def _modulated(block: Any, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    return block.norm1(hidden, emb=embedding)[0]


def modulated_by_image(block: Any, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Qwen-Image: the input of the image's attention, after adaLN modulation."""
    # if reference images have their own timestep, the sample's rows come first
    shift, scale, *_ = block.img_mod(embedding[: len(hidden)]).chunk(6, dim=-1)
    return block.img_norm1(hidden) * (1 + scale[:, None]) + shift[:, None]


def _embedding(block: Any, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Wan: the projected timestep embedding that blocks receive."""
    return embedding


def given_coefficients(ctx: DenoiserContext) -> TeaCache | None:
    """The deployment's coefficients, None if unset. Raises `ConfigError` unless they are a list of numbers."""
    given = ctx.options.get(OPTION)
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(_is_number(value) for value in given):
        field = f"stages.{ctx.stage}.options.{OPTION}"
        raise ConfigError(f"{field} is {given!r}; it must be a list of numbers, the highest power's first", field=field)
    return TeaCache(tuple(map(float, given)), _THRESHOLD)


def published(ctx: DenoiserContext, network: Any) -> TeaCache | None:
    """The published rule of a network, None if there is none. Wan 2.1 image-to-video has several, by a size that no
    file states."""
    index = pipeline_index(ctx.model_dir)
    match type(network).__name__, index.get("_class_name"):
        case "FluxTransformer2DModel", "FluxPipeline":
            return PUBLISHED["FLUX.1"]
        case "WanTransformer3DModel", "WanPipeline" if index.get("boundary_ratio") is None:
            width = network.config.num_attention_heads * network.config.attention_head_dim
            return PUBLISHED[_WAN[width]] if width in _WAN and not index.get("expand_timesteps") else None
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
