"""Tensor parallelism of denoisers: each rank holds a part of the weights of every block (Megatron-LM, arXiv
1909.08053).

diffusers has plans for only a few of its models (`_tp_plan`, through DTensor, on GPUs only). Here blocks are divided by
their components, which are the same in all served networks: attention by heads, feed-forward layers by their inner
width. Every rank holds all weights outside these (embeddings, modulations, norms).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from segue.engines.diffusion.contract import DenoiserContext
from segue.kernels.linear.lora import Share
from segue.messages.errors import ConfigError
from segue.models.shared.diffusion.library import (
    GELU,
    Attention,
    AttentionModuleMixin,
    FeedForward,
    FluxSingleTransformerBlock,
    RMSNorm,
    ZImageFeedForward,
)
from segue.parallel.group import Group
from segue.parallel.layers import ColumnParallel, RowParallel, SummedRMSNorm
from segue.parallel.shard import share

SERVED = (
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)
"""Networks whose blocks consist only of components that can be divided here."""
_BY_HEAD = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


def divide_weights(network: nn.Module, ctx: DenoiserContext) -> None:
    """Keep this rank's part of the weights, in place. All ranks of `ctx.ways.weights` must make the same calls.

    Raises `ConfigError` (`tensor_parallel`) for an unsupported network, or heads that the ranks do not divide evenly.
    """
    assert ctx.ways is not None, "a stage with several ranks has `ways`"
    assert ctx.ways.weights is not None, "its weights are divided"
    cutter = _Cutter(type(network).__name__, ctx.stage, ctx.ways.weights, adapted=ctx.lora is not None)
    if cutter.kind not in SERVED:
        raise cutter.unserved(f"its blocks are not those of {', '.join(SERVED)}")
    for name, module in list(network.named_modules()):
        match module:
            case Attention() | AttentionModuleMixin():
                cutter.attention(name, module)
            case FeedForward():
                cutter.feed_forward(name, module)
            case ZImageFeedForward():
                module.w1 = cutter.columns(module.w1)
                module.w3 = cutter.columns(module.w3)
                module.w2 = cutter.rows(module.w2)
            case FluxSingleTransformerBlock():
                module.proj_mlp = cutter.columns(module.proj_mlp)
                inner = module.proj_out.in_features - module.mlp_hidden_dim  # attention, then the feed-forward layer
                module.proj_out = cutter.rows(module.proj_out, [inner, module.mlp_hidden_dim])


class _Cutter:
    """Divides the layers of one network."""

    def __init__(self, kind: str, stage: str, group: Group, *, adapted: bool) -> None:
        """`adapted`: the stage serves LoRA adapters, so layers must record which part of the full layer they hold."""
        self.kind = kind
        self._adapted = adapted
        self._stage = stage
        self._group = group

    def attention(self, name: str, module: Any) -> None:
        """Divide an attention module: each rank gets whole heads."""
        size = self._group.size
        if module.heads % size:
            raise self.unserved(f"{name} has {module.heads} heads, which {size} does not divide")
        width = module.to_q.out_features
        layers = dict(module.named_children())  # some have no text projections or no norms
        for part in _BY_HEAD:
            if part in layers:
                setattr(module, part, self.columns(layers[part]))
        for part in _NORMS:
            if part in layers and _normed(layers[part]) == width:
                setattr(module, part, self.norm(f"{name}.{part}", layers[part]))
        module.heads //= size
        module.inner_dim //= size
        if "to_out" in layers:
            module.to_out[0] = self.rows(module.to_out[0])
        if "to_add_out" in layers:
            module.to_add_out = self.rows(module.to_add_out)

    def feed_forward(self, name: str, module: FeedForward) -> None:
        if not isinstance(module.net[0], GELU):
            raise self.unserved(f"{name} begins with {type(module.net[0]).__name__}")
        module.net[0].proj = self.columns(module.net[0].proj)
        module.net[2] = self.rows(module.net[2])

    def norm(self, name: str, norm: nn.Module) -> nn.Module:
        """Divide a norm over all heads."""
        if not isinstance(norm, nn.RMSNorm):
            raise self.unserved(f"{name} is a {type(norm).__name__} over all heads")
        width = _normed(norm)
        weight = None if norm.weight is None else share(norm.weight, 0, [width], self._group)
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        return SummedRMSNorm(weight, width, eps, self._group)

    def columns(self, linear: nn.Linear) -> nn.Module:
        held = Share(linear.in_features, linear.out_features, (0, linear.in_features), (self.own(linear.out_features),))
        linear.weight = share(linear.weight, 0, [linear.out_features], self._group)
        if linear.bias is not None:
            linear.bias = share(linear.bias, 0, [linear.out_features], self._group)
        linear.out_features = len(linear.weight)
        return ColumnParallel(linear, held) if self._adapted else linear

    def own(self, features: int, start: int = 0) -> tuple[int, int]:
        """[start, stop) of this rank's share of a piece of `features` features that begins at `start`."""
        each, more = divmod(features, self._group.size)
        first, behind = (rank * each + min(rank, more) for rank in (self._group.rank, self._group.rank + 1))
        return start + first, start + behind

    def rows(self, linear: nn.Linear, sizes: Sequence[int] | None = None) -> RowParallel:
        """Divide a layer by its inputs. `sizes`: the pieces that its input is concatenated from."""
        pieces = sizes or [linear.in_features]
        first, *others = (self.own(piece, sum(pieces[:number])) for number, piece in enumerate(pieces))
        outputs = ((0, linear.out_features),)
        held = Share(linear.in_features, linear.out_features, first, outputs, more_inputs=tuple(others))
        linear.weight = share(linear.weight, 1, pieces, self._group)
        linear.in_features = linear.weight.shape[1]
        bias = linear.bias
        linear.register_parameter("bias", None)
        return RowParallel(linear, bias, self._group, split=False, share=held)

    def unserved(self, reason: str) -> ConfigError:
        return ConfigError(
            f"stage {self._stage!r}: {self.kind} cannot be run tensor parallel: {reason}; tensor_parallel is "
            f"{self._group.size}",
            field=f"stages.{self._stage}.tensor_parallel",
        )


def _normed(norm: nn.Module) -> int:
    """Number of features that a norm covers; 0: unknown."""
    if isinstance(norm, nn.RMSNorm | nn.LayerNorm):
        return norm.normalized_shape[-1]
    return int(norm.dim[-1]) if isinstance(norm, RMSNorm) else 0
