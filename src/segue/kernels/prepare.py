"""Prepares networks for a device: `prepare` does what a stage's `Plan` asks for, as far as the device has it.

| what | GPU | CPU | CPU in float32 with compiled kernels |
|---|---|---|---|
| layers with the same input are joined | yes | yes | yes |
| linear layers are quantised | stored in fewer bits | int8, bfloat16, int4 of torch | those of `segue.kernels.cpu` |
| linear layers and experts are packed | no | in float32 | in panels |
| norms in one pass | yes | no | yes |
| gated layers in one pass, attention | torch's | torch's | those of `segue.kernels.cpu` |
| patches that are cut already are embedded by a GEMM | yes | yes | yes |
| rows of repeated inputs are cached | no | yes | yes |
| calls are replayed | CUDA graphs | no | captured lists |

A model's code states what it knows of its network; kernels are chosen here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.graphs.replay import NetworkGraphs, replayer_on
from segue.kernels.linear.experts import PACKED_EXPERTS, pack_experts
from segue.kernels.linear.fused_linear import Siblings, fuse, siblings
from segue.kernels.linear.kept_rows import KeptRows, RowNames
from segue.kernels.linear.layers import PreparedLinear
from segue.kernels.linear.linear import PackedLinear, can_pack, pack_linears
from segue.kernels.linear.patches import embed_patches
from segue.kernels.linear.quantized import quantize_linears
from segue.kernels.recognised_norms import norms_by_torch

DECODE_ROWS = 8
"""Usual rows per call of a decoder on a CPU."""

WeightsOf: TypeAlias = Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor | None] | None]
"""Weight [outputs, inputs] and bias [outputs] of a linear layer; None for any other module."""


def plain_weights(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Those of an unmodified `nn.Linear`."""
    return (module.weight, module.bias) if type(module) is nn.Linear else None


@dataclass(frozen=True, slots=True)
class Gelu:
    """A GELU after a linear layer whose output goes nowhere else. Names are dotted."""

    linear: str
    approximate: str
    """`none` or `tanh`, as in `functional.gelu`."""
    place: str
    """The module that does both, or the linear layer: the packed layer takes its place, and does both."""
    idle: str | None = None
    """The module of the GELU alone, if `place` is the linear layer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stage wants of a network. Steps run in the order of the fields; each is left out by default."""

    recognised: bool = False
    """Replace modules that, by their results, are RMSNorms or gated feed-forward layers with joined parts."""
    shared: Siblings | None = None
    """Join these layers, which had the same input: from `siblings`."""
    quantization: str = "none"
    weights: WeightsOf = plain_weights
    """Finds the layers to quantise."""
    attention: Iterable[nn.Module] = ()
    """Modules that call `scaled_dot_product_attention`; their input is [rows, tokens, features], the first argument or
    `hidden_states`."""
    repeated: Mapping[str, int] = field(default_factory=dict)
    """Layers whose input rows repeat between calls, and that compute each row apart: name → output features."""
    rows: int = 0
    """Pack linear layers for this usual number of rows per call."""
    keep: Collection[str] = ()
    """Submodules that are not packed, with their children, e.g. if the model's code reads their weights."""
    gelus: Sequence[Gelu] = ()
    """Packed together with their linear layers."""
    patches: bool = False
    """Convolutions get patches that are cut already, each of the size of the kernel: they are linear layers."""
    experts: nn.Module | None = None
    """A model of transformers in the network, or the network: its mixtures of experts are packed as well."""
    first_call: bool = False
    """Join layers that have the same input in the first call, and pack only after it."""
    replayed: bool = False
    """Replay calls of equal shapes."""
    dtype: torch.dtype | None = None
    """Of activations: needed for `attention` and `replayed`."""
    compiled: bool = False
    """Its blocks are compiled by torch."""


def prepare(network: nn.Module, device: torch.device, plan: Plan) -> int:
    """Change a network on `device` in place; returns the number of quantised layers. A network may be prepared again,
    with further plans."""
    compiled = cpu_kernels() if device.type == "cpu" else None
    if compiled is not None and plan.recognised:
        compiled.fuse_norms(network)
    if device.type == "cuda" and plan.recognised:
        norms_by_torch(network, device)
    if plan.shared is not None:
        fuse(network, plan.shared)
    if compiled is not None and plan.recognised:
        compiled.fuse_gates(network)
    quantized = 0 if plan.quantization == "none" else quantize_linears(network, plan.quantization, plan.weights)
    in_floats = compiled is not None and plan.dtype == torch.float32 and not plan.compiled
    if compiled is not None and in_floats:
        compiled.compile_attention(plan.attention)
    if plan.patches:
        embed_patches(network)
    if device.type == "cpu":
        _keep_rows(network, plan.repeated)
    if plan.first_call:
        _FirstCall(network, plan)
    elif plan.rows:
        _pack(network, plan)
    if plan.replayed and (in_floats or device.type == "cuda"):
        replayer = replayer_on(device)
        assert replayer is not None
        network.forward = NetworkGraphs(network.forward, device, replayer)
    return quantized


def prepared_bytes(network: nn.Module) -> int:
    """Most bytes that a prepared network holds besides its tensors and accounted activations."""
    graphs = network.forward.held_bytes if isinstance(network.forward, NetworkGraphs) else 0
    packed = sum(layer.hidden_bytes for layer in network.modules() if isinstance(layer, PreparedLinear))
    return graphs + packed + sum(layer.most_bytes for layer in network.modules() if isinstance(layer, KeptRows))


@contextmanager
def bypassed(root: nn.Module) -> Iterator[set[str]]:
    """Collects, while `root` runs, the names of linear layers that were not called although their parent module was:
    the parent's code may read their weights directly. The yielded set is filled on exit."""
    called: set[str] = set()
    found: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, given, name=name: called.add(name))
        for name, module in root.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    linears = {name for name, module in root.named_modules() if isinstance(module, nn.Linear)}
    found |= {name for name in linears - called if name.rpartition(".")[0] in called}


def _keep_rows(network: nn.Module, repeated: Mapping[str, int]) -> None:
    names = RowNames()
    for name, features in repeated.items():
        network.set_submodule(name, KeptRows(network.get_submodule(name), names, features))


def _pack(network: nn.Module, plan: Plan) -> None:
    for gelu in plan.gelus:
        linear = network.get_submodule(gelu.linear)
        if isinstance(linear, nn.Linear) and can_pack(linear):
            network.set_submodule(gelu.place, PackedLinear(linear, plan.rows, gelu.approximate))
            if gelu.idle is not None:
                network.set_submodule(gelu.idle, nn.Identity())
    pack_linears(network, plan.rows, keep=plan.keep)
    if plan.experts is not None and pack_experts(plan.experts, plan.rows):
        plan.experts.set_experts_implementation(PACKED_EXPERTS)  # type: ignore[operator]


class _FirstCall:
    """Watches the first successful call; a failed call is ignored."""

    def __init__(self, network: nn.Module, plan: Plan) -> None:
        self._plan = plan
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
        if self._plan.rows:
            _pack(network, self._plan)
