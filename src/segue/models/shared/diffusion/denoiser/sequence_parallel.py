"""Sequence parallelism: each rank computes a part of every row's tokens, by diffusers' context parallelism.

The library's models declare where their tensors are split and joined (`_cp_plan`); its hooks split them, and its
attention exchanges the parts that each rank lacks:

| `sequence_mode` | exchanged | attention |
|---|---|---|
| `ulysses` | tokens for heads (Jacobs et al., "DeepSpeed Ulysses", 2023) | any that the library allows |
| `ring` | keys and values; partial softmaxes are joined (Liu et al., "Ring Attention", 2023) | without masks |
| both | heads in the rows of a grid, keys and values along its columns ("USP", arXiv 2405.07719) | without masks |

Sequences that the ranks do not divide evenly use the library's variants for any length, which ask the other ranks for
their lengths in every layer; evenly divided ones do not. Both modes together have no such variant: these sequences use
a single ring of all ranks.

This module also selects the library's attention backend for a network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from segue.engines.diffusion.contract import DenoiserContext
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.shared.diffusion.library import (
    Attention,
    AttentionModuleMixin,
    ContextParallelConfig,
    ContextParallelOutput,
    ParallelConfig,
    apply_context_parallel,
    attention_backend,
)
from segue.parallel.cpu_flash import register_cpu_flash
from segue.parallel.group import Group
from segue.parallel.layers import Divided


def set_attention(network: Any, backend: str) -> None:
    """Set the backend for this network alone: the library would make it the process-wide default. Raises the library's
    exceptions."""
    with attention_backend():  # restores the previous default on exit
        network.set_attention_backend(backend)


RING_ATTENTION = ("auto", "cudnn", "flash", "sage")
"""Those of `segue.graph.kinds.diffusion.ATTENTIONS` that return the log-sum-exp of a query's scores."""
ULYSSES_ATTENTION = ("auto", "native", "cudnn", "flash", "sage")
"""Those that the library runs sequence parallel."""
_JOIN = ContextParallelOutput(gather_dim=1, expected_dims=3)
"""The plans' entry for gathering the output's tokens."""
_JOINED = "_native_flash"
"""The library's name for torch's flash attention with the values needed to join partial softmaxes."""


def rows_of_one_length(ctx: DenoiserContext) -> bool:
    """Whether rows of a call must have equal lengths, because the attention takes no masks."""
    return ctx.sequence_ring > 1


def check_sequence(ctx: DenoiserContext) -> None:
    """Raises `ConfigError` for incompatible keys, before anything is loaded."""
    ring = ctx.sequence_ring > 1
    mode, known = ("ring", RING_ATTENTION) if ring else ("ulysses", ULYSSES_ATTENTION)
    if ctx.attention not in known:
        raise ConfigError(
            f"stage {ctx.stage!r}: attention is {ctx.attention!r}, which does not support sequence_mode {mode!r}; it "
            f"must be {', '.join(known[:-1])} or {known[-1]}",
            field=f"stages.{ctx.stage}.attention",
        )
    if ring and ctx.device.type == "cuda" and ctx.dtype == torch.float32:
        raise ConfigError(
            f"stage {ctx.stage!r}: dtype is float32, for which no GPU kernel supports sequence_mode 'ring'; "
            "it must be bfloat16 or float16",
            field=f"stages.{ctx.stage}.dtype",
        )


def divide_sequence(network: Any, ctx: DenoiserContext) -> None:
    """Divide the tokens of each call among the ranks of `ctx.ways.tokens`; all must make the same calls.

    Opens torch's default process group, which the library's code uses. Raises `ConfigError` for a network that cannot
    be divided.
    """
    assert ctx.ways is not None, "a stage with several ranks has `ways`"
    assert ctx.ways.tokens is not None, "its tokens are divided"
    group, ring = ctx.ways.tokens, ctx.sequence_ring
    _check_network(network, ctx)
    if ring > 1 and group.device.type == "cpu":
        register_cpu_flash()
    if ring > 1 and ctx.attention == "auto":
        set_attention(network, _JOINED)
    group.open_default()
    config = _config(group, ring)
    # the steps of `enable_parallelism`, which requires an accelerator and sets the rank itself
    everything = ParallelConfig(context_parallel_config=config)
    for module in network.modules():
        # processors share no class; those that do not support it lack this attribute
        if isinstance(module, Attention | AttentionModuleMixin) and hasattr(module.processor, "_parallel_config"):
            module.processor._parallel_config = everything
    splits = {name: part for name, part in network._cp_plan.items() if isinstance(part, dict)}
    apply_context_parallel(network, config, splits)
    uneven = _config(group, group.size) if 1 < ring < group.size else config
    division = _Division(everything, config, uneven, group, ctx.stage)
    network.register_forward_pre_hook(division.before, with_kwargs=True)
    for name in network._cp_plan.keys() - splits.keys():
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear), "plans join after the last linear layer"
        network.set_submodule(name, _Joined(layer, division))


def _config(group: Group, ring: int) -> Any:
    """The library's config; `ring`: ranks of a column; the others, of a row, exchange heads."""
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=group.size // ring)
    mesh = torch.distributed.init_device_mesh(
        group.device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names
    )
    config.setup(group.rank, group.size, group.device, mesh)
    return config


def _check_network(network: Any, ctx: DenoiserContext) -> None:
    reason = None
    ulysses, weights = ctx.sequence_parallel // ctx.sequence_ring, ctx.tensor_parallel
    if network._cp_plan is None:
        reason = "diffusers has no plan for it (_cp_plan)"
    elif any(not isinstance(part, dict) and part != _JOIN for part in network._cp_plan.values()):
        reason = "its plan joins other tensors than its output"
    elif (heads := network.config.num_attention_heads) % (ulysses * weights):
        divided = f"{ulysses} x tensor_parallel {weights}" if weights > 1 else f"{ulysses}"
        reason = f"sequence_mode 'ulysses' divides its {heads} attention heads, which {divided} does not"
    if reason is not None:
        raise ConfigError(
            f"stage {ctx.stage!r}: {type(network).__name__} cannot be run sequence parallel: {reason}; "
            f"sequence_parallel is {ctx.sequence_parallel}",
            field=f"stages.{ctx.stage}.sequence_parallel",
        )


@dataclass(slots=True)
class _Division:
    """Splits and joins the tokens before and after the blocks of one network."""

    chosen: Any
    """The object in which the library's attention looks up its config."""
    even: Any
    """Config of calls whose sequences divide evenly; the splitting hooks read only this one."""
    uneven: Any
    """Config of the other calls."""
    group: Group
    stage: str
    tokens: int = 0
    """Image tokens of this call."""

    def before(self, network: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A forward pre-hook: choose the variant of the library's attention by the lengths of this call."""
        lengths, size = _lengths(network, named), self.group.size
        what, shortest = min(lengths.items(), key=lambda item: item[1])
        if shortest < size:
            raise InvalidRequest(
                f"{what} of {shortest} tokens cannot be divided among the {size} ranks of stage {self.stage!r}",
                field="prompt" if what == "text" else "size",
            )
        self.tokens = lengths["image"]
        uneven = any(length % size for length in lengths.values())
        for config in (self.even, self.uneven):
            config.ring_anything = uneven and self.uneven.ring_degree > 1
            config.ulysses_anything = uneven and self.uneven.ring_degree == 1
        self.chosen.context_parallel_config = self.uneven if uneven else self.even

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's tokens, features] → [rows, all tokens, features]. The library's own version asks all ranks
        for their lengths, and cannot gather uneven ones over Gloo."""
        size = self.group.size
        lengths = [self.tokens // size + (rank < self.tokens % size) for rank in range(size)]
        padded = functional.pad(part, (0, 0, 0, lengths[0] - part.shape[1]))
        parts = self.group.all_gather(padded[None])  # [ranks, rows, tokens, features]
        return torch.cat([one[:, :length] for one, length in zip(parts, lengths, strict=True)], dim=1)


class _Joined(Divided):
    """A layer whose output is gathered. Not a hook on the layer: packing replaces the layer, and its hooks are lost."""

    def __init__(self, linear: nn.Linear, division: _Division) -> None:
        super().__init__(linear, None)
        self._division = division

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's tokens, features] → [rows, all tokens, out features]."""
        return self._division.join(self.linear(x))


def _lengths(network: Any, named: dict[str, Any]) -> dict[str, int]:
    """Lengths of the sequences that are split."""
    hidden = named["hidden_states"]
    if hidden.ndim == 5:  # latents of a video, which the network cuts into patches itself
        patches = zip(hidden.shape[2:], network.config.patch_size, strict=True)
        return {"image": math.prod(side // patch for side, patch in patches)}
    lengths = {"image": hidden.shape[1]}
    if any(isinstance(part, dict) and "encoder_hidden_states" in part for part in network._cp_plan.values()):
        lengths["text"] = named["encoder_hidden_states"].shape[1]
    return lengths
