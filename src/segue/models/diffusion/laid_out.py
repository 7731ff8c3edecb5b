"""Linear layers of a network made ready for its calls: one product for what has the same input, weights packed.

Which layers have the same input (q, k and v; gate and up) is seen in the network's first call, whoever makes it; from
the second on they are one product. On a CPU in float32 their weights are laid out for their products, and a GELU
behind a product is part of it. All of it changes results by rounding alone.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from torch import nn

from segue.kernels.fused_linear import Siblings, fuse, siblings
from segue.kernels.linear import PackedLinear, can_pack, pack_linears
from segue.models.diffusion.library import GELU, FluxSingleTransformerBlock

PACKED_ROWS = 256
"""Tokens of a call, roughly, on a CPU: what the weights are laid out for."""


def pack(network: nn.Module, keep: Collection[str] = (), *, activations: bool = True) -> None:
    """Pack what can be; `keep`: layers whose weights the network looks at. `activations`: GELUs are made part of the
    products before them; not where something is to be put over the layers."""
    if activations:
        _pack_activations(network)
    pack_linears(network, PACKED_ROWS, keep=keep)


def fuse_after_first_call(network: nn.Module, keep: Collection[str] = ()) -> None:
    """Have the layers of `network` fused, where they are seen to have the same input, and packed, by its first call."""
    _FirstCall(network, keep)


class _FirstCall:
    """Watches a call; one that fails is watched again."""

    def __init__(self, network: nn.Module, keep: Collection[str]) -> None:
        self._keep = keep
        self._watching = ExitStack()
        self._found = Siblings()
        self._hooks = [
            network.register_forward_pre_hook(self._begin),
            network.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, network: nn.Module, given: Any) -> None:
        self._watching.close()
        self._found = self._watching.enter_context(siblings(network))

    def _end(self, network: nn.Module, given: Any, made: Any) -> None:
        self._watching.close()
        if made is None:
            return
        for hook in self._hooks:
            hook.remove()
        fuse(network, self._found)
        pack(network, self._keep)


def _pack_activations(network: nn.Module) -> None:
    for name, module in list(network.named_modules()):
        if type(module) is GELU and can_pack(module.proj):
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, PackedLinear(module.proj, PACKED_ROWS, module.approximate))
        elif type(module) is FluxSingleTransformerBlock and can_pack(module.proj_mlp):
            module.proj_mlp = PackedLinear(module.proj_mlp, PACKED_ROWS, module.act_mlp.approximate)
            module.act_mlp = nn.Identity()
