"""Shards a model of transformers to one rank's part, by its own tensor parallel plan (`tp_plan`).

The plan says how each kind of layer is divided. Sharding and communication between ranks are implemented here on plain
tensors, because the library's own go through DTensor and install themselves at loading, in ways that differ between
versions. Styles that concern gradients only are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from segue.kernels.linear.lora import Share
from segue.messages.errors import ConfigError
from segue.parallel.group import Group
from segue.parallel.layers import ColumnParallel, Gathered, RowParallel, SharedEmbedding

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_SUMMED = ("moe_tp_experts", "all_reduce")
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Names of layers that compute keys, alone or together with others."""


def shard(model: nn.Module, plan: Mapping[str, str] | None, config: Any, group: Group) -> None:
    """Keep this rank's part of the model's weights, in place. `config`: that of the text decoder.

    Raises `ConfigError` (`tensor_parallel`) for a model without a plan, an unsupported style, or a size that is not
    divisible by the number of ranks, naming it.
    """
    kind = type(model).__name__
    layers = {name: style for name, style in (plan or {}).items() if "*" in name}
    if not any(style not in _WHOLE for style in layers.values()):
        raise _unserved(kind, "transformers has no tensor parallel plan (tp_plan) for its layers")
    _check_heads(kind, layers, config, group.size)
    _Cutter(model, kind, group).cut(plan or {})


def share(whole: torch.Tensor, axis: int, sizes: Sequence[int], group: Group) -> nn.Parameter:
    """This rank's part of each of several pieces of an axis with lengths `sizes`; if a piece is not divisible by the
    number of ranks, the first ranks get one more."""
    pieces = whole.detach().split(list(sizes), dim=axis)
    shares = [piece.tensor_split(group.size, dim=axis)[group.rank] for piece in pieces]
    return nn.Parameter(torch.cat(shares, dim=axis), requires_grad=False)


def _unserved(kind: str, reason: str) -> ConfigError:
    return ConfigError(f"{kind} cannot be run tensor parallel: {reason}", field="tensor_parallel")


def _check_heads(kind: str, layers: Mapping[str, str], config: Any, size: int) -> None:
    """Check that each rank gets whole heads, unless they are all gathered to every rank."""
    if not any(name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in layers.items()):
        return
    for name in ("num_attention_heads", "num_key_value_heads"):
        # no base class has it: families use other names (`n_head`), which their configs map to this attribute
        # but to no key of `to_dict`, and some have no such heads at all
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise _unserved(
                kind, f"its {name} is {heads}, which cannot be divided by {size}; tensor_parallel must divide it"
            )


class _Cutter:
    """The state of sharding one model."""

    def __init__(self, model: nn.Module, kind: str, group: Group) -> None:
        self.model = model
        self.kind = kind
        self.group = group
        self.rows: dict[torch.Tensor, nn.Parameter] = {}
        """Whole table → padded part: an embedding and a head that share the table keep sharing its part."""

    def cut(self, plan: Mapping[str, str]) -> None:
        parameters = {
            name: style
            for name, _ in self.model.named_parameters(remove_duplicate=False)
            if (style := plan.get(_pattern(name)))
        }
        modules = [
            (name, module, style)
            for name, module in self.model.named_modules()
            if (style := plan.get(_pattern(name))) and style not in _WHOLE
        ]
        if not any("*" in _pattern(name) for name in (*parameters, *(name for name, _, _ in modules))):
            # for example, a plan for experts only, and this checkpoint has none
            raise _unserved(self.kind, "its tensor parallel plan (tp_plan) divides none of the layers that it has")
        for name, style in parameters.items():
            self.parameter(name, style)
        for name, module, style in modules:
            self.module(name, module, style)

    def module(self, name: str, module: nn.Module, style: str) -> None:
        if style in _SUMMED:
            module.register_forward_hook(self.summed)
        elif style == "embedding_rowwise" and isinstance(module, nn.Embedding):
            module.weight = self.table(module.weight)
            module.num_embeddings = len(module.weight)
            module.padding_idx = None  # it is an id of the whole table, and matters to gradients only
            self.replace(name, SharedEmbedding(module, self.group))
        elif type(module) is nn.Linear:
            self.linear(name, module, style)
        else:
            raise _unserved(self.kind, f"its plan has unsupported style {style!r} for {name} ({type(module).__name__})")

    def linear(self, name: str, linear: nn.Linear, style: str) -> None:
        pieces = 2 if style == "packed_colwise" else 1
        inputs, outputs = linear.in_features, linear.out_features
        if style in ("colwise", "packed_colwise"):
            linear.weight = self.part(name, linear.weight, 0, pieces)
            if linear.bias is not None:
                linear.bias = self.part(name, linear.bias, 0, pieces)
            mine = self.ranges(outputs, pieces)
            self.replace(name, ColumnParallel(linear, Share(inputs, outputs, (0, inputs), mine)))
        elif style in ("rowwise", *_SPLIT):
            linear.weight = self.part(name, linear.weight, 1)
            bias = linear.bias
            linear.register_parameter("bias", None)
            [own] = self.ranges(inputs)
            held = Share(inputs, outputs, own, ((0, outputs),))
            self.replace(name, RowParallel(linear, bias, self.group, split=style in _SPLIT, share=held))
        elif style in _GATHERED:
            linear.weight = self.table(linear.weight)
            if linear.bias is not None:
                linear.bias = self.table(linear.bias)
            each = len(linear.weight)
            first, last = (min(outputs, (self.group.rank + more) * each) for more in (0, 1))
            held = Share(inputs, outputs, (0, inputs), ((first, last),), padding=each - (last - first))
            self.replace(name, Gathered(linear, held, self.group))
        else:
            raise _unserved(self.kind, f"its plan has unsupported style {style!r} for {name}")
        linear.out_features, linear.in_features = linear.weight.shape

    def parameter(self, name: str, style: str) -> None:
        """Shard a parameter that the plan names itself: the weights of experts, [experts, out, in]."""
        owner_name, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(owner_name)
        whole = owner.get_parameter(leaf)
        axes = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)}
        if style not in axes or whole.ndim != 3:
            raise _unserved(self.kind, f"its plan has unsupported style {style!r} for the parameter {name}")
        axis, pieces = axes[style]
        setattr(owner, leaf, self.part(name, whole, axis, pieces))

    def part(self, name: str, whole: torch.Tensor, axis: int, pieces: int = 1) -> nn.Parameter:
        """This rank's share of an axis, or of each of several equal pieces of it."""
        size = self.group.size
        if whole.shape[axis] % (size * pieces):
            raise _unserved(
                self.kind,
                f"{name} has {whole.shape[axis] // pieces} features to divide, which is not divisible by {size}",
            )
        return share(whole, axis, [whole.shape[axis] // pieces] * pieces, self.group)

    def ranges(self, features: int, pieces: int = 1) -> tuple[tuple[int, int], ...]:
        """The ranges of an axis that `part` takes."""
        piece, width = features // pieces, features // (self.group.size * pieces)
        starts = [number * piece + self.group.rank * width for number in range(pieces)]
        return tuple((start, start + width) for start in starts)

    def table(self, whole: torch.Tensor) -> nn.Parameter:
        """This rank's rows, zero-padded: all ranks have equally many."""
        if whole not in self.rows:
            each = -(-len(whole) // self.group.size)
            mine = whole.detach()[self.group.rank * each : (self.group.rank + 1) * each]
            padding = mine.new_zeros(each - len(mine), *mine.shape[1:])
            self.rows[whole] = nn.Parameter(torch.cat([mine, padding]), requires_grad=False)
        return self.rows[whole]

    def replace(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, module)

    def summed(self, module: nn.Module, given: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        """A forward hook: sums the ranks' parts of every expert."""
        return self.group.all_reduce(out.contiguous())


def _pattern(name: str) -> str:
    """A module's name in the form of plans: numbers become `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
