"""LoRA over linear layers: adds the low-rank updates of many adapters in one flat batch.

`y = W x + (alpha / r) B A x` (Hu et al., *LoRA*, 2021, §4.1), each token with the A and B of its own adapter, or none
(Chen et al., *Punica*, 2023, §3). The adapters of a step's tokens are set on an object that the layers of one engine
share; in a step without adapters the layers only call their base layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from segue.kernels.linear.layers import PreparedLinear
from segue.kernels.staging import upload


class Pair(NamedTuple):
    """An adapter's matrices for one layer."""

    down: torch.Tensor
    """A: [rank, in_features]."""
    up: torch.Tensor
    """B times its scale: [out_features, rank]."""


class Share(NamedTuple):
    """This rank's features of a linear layer that is divided among several ranks.

    If a layer's inputs are divided, each rank computes `B A_r x_r`, and the all-reduce that sums the ranks' partial
    outputs of the layer sums these as well.
    """

    in_features: int
    """Input features of the whole layer."""
    out_features: int
    inputs: tuple[int, int]
    """[start, stop) of its input features."""
    outputs: tuple[tuple[int, int], ...]
    """[start, stop) of its output features, in order."""
    padding: int = 0
    """Number of zero outputs after them."""
    more_inputs: tuple[tuple[int, int], ...] = ()
    """[start, stop) of further input features after the first range, for a layer whose input concatenates several."""

    def of(self, pair: Pair) -> Pair:
        """This rank's part of an adapter's matrices for the whole layer."""
        rows = [pair.up[start:stop] for start, stop in self.outputs]
        if self.padding:
            rows.append(pair.up.new_zeros(self.padding, pair.up.shape[1]))
        down = pair.down[:, slice(*self.inputs)].contiguous()
        if self.more_inputs:
            down = torch.cat([down, *(pair.down[:, slice(*part)] for part in self.more_inputs)], dim=1)
        return Pair(down, torch.cat(rows))


@dataclass(frozen=True, eq=False)
class Lora:
    """A loaded adapter. It lives as long as a sequence uses it, even after its name was unloaded."""

    name: str
    identity: bytes
    """Unique per loaded adapter, even among those of the same name: identifies the tokens computed with it."""
    pairs: Mapping[str, Pair]
    """By dotted name of the layer."""


@dataclass(slots=True)
class LoraStep:
    """The adapters of a step's flat tokens."""

    tokens: int
    rows: list[tuple[Lora, torch.Tensor]]
    """Each adapter with its flat tokens [n] long; no token has two."""
    _columns: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def loras(self) -> tuple[Lora, ...]:
        return tuple(lora for lora, _ in self.rows)

    def columns(self, ranks: Sequence[int]) -> torch.Tensor:
        """[tokens, sum of ranks] bool: the columns of each token's adapter; `ranks` is parallel to `rows`."""
        key = tuple(ranks)
        if key not in self._columns:
            owner = torch.full((self.tokens,), -1, dtype=torch.long, device=self.rows[0][1].device)
            for number, (_, rows) in enumerate(self.rows):
                owner[rows] = number
            owners = [number for number, rank in enumerate(ranks) for _ in range(rank)]
            self._columns[key] = owner[:, None] == upload(np.array(owners, dtype=np.int64), owner.device)
        return self._columns[key]


def lora_step(spans: Sequence[tuple[Lora | None, int, int]], device: torch.device) -> LoraStep | None:
    """The step of sequences with flat tokens [begin, end) each, in order; None if none has an adapter."""
    places: dict[Lora, list[tuple[int, int]]] = {}
    for lora, begin, end in spans:
        if lora is not None:
            places.setdefault(lora, []).append((begin, end))
    if not places:
        return None
    rows = [
        (lora, upload(np.concatenate([np.arange(begin, end) for begin, end in ranges]), device))
        for lora, ranges in places.items()
    ]
    return LoraStep(spans[-1][2], rows)


class LoraSwitch:
    """Tells the layers of one engine which adapters the running step has."""

    def __init__(self) -> None:
        self.step: LoraStep | None = None
        self.whole: Lora | None = None
        """Adapter of every row of every layer's input, whatever the number of rows."""

    @contextmanager
    def during(self, step: LoraStep | None) -> Iterator[None]:
        """Within it, the layers apply the adapters of `step`. A step with adapters runs eagerly: their number and ranks
        change from step to step, so compiled code exists only for steps without adapters."""
        self.step = step
        try:
            with nullcontext() if step is None else torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self.step = None

    @contextmanager
    def during_whole(self, lora: Lora | None) -> Iterator[None]:
        """Within it, all rows have this adapter, or none if it is None."""
        self.whole = lora
        try:
            yield
        finally:
            self.whole = None


class LoraLinear(nn.Module):
    """A linear layer of any kind plus the adapters of the step. Its input is [..., tokens, in_features]."""

    def __init__(self, base: nn.Module, name: str, in_features: int, out_features: int, switch: LoraSwitch) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self.share: Share | None = None
        """Set if several ranks divide the layer; the features above are then this rank's."""
        self._switch = switch
        self._stacked: tuple[tuple[Lora, ...], Pair] | None = None
        """Concatenated A and B of the adapters of the last step with several."""

    @property
    def whole(self) -> tuple[int, int]:
        """(in_features, out_features) of the layer over all ranks."""
        if self.share is None:
            return self.in_features, self.out_features
        return self.share.in_features, self.share.out_features

    def own(self, pair: Pair) -> Pair:
        """This rank's part of an adapter's matrices for the whole layer."""
        return pair if self.share is None else self.share.of(pair)

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the base layer, whose dtype models read."""
        weight = self.base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        y = self.base(x)
        if self._switch.whole is not None and (pair := self._switch.whole.pairs.get(self.name)) is not None:
            y = y + ((x.to(pair.down.dtype) @ pair.down.T) @ pair.up.T).to(y.dtype)
        step = self._switch.step
        if step is not None:
            self.add(y, x, step)
        return y

    def add(self, y: torch.Tensor, x: torch.Tensor, step: LoraStep) -> None:
        """y [..., out_features] += the step's adapters applied to x [..., in_features]."""
        out, rows = y.view(-1, self.out_features), x.reshape(-1, self.in_features)
        if len(rows) != step.tokens:
            raise ValueError(f"{self.name} got {len(rows)} rows in a step of {step.tokens} tokens")
        if x.device.type == "cpu" or len(step.rows) == 1:
            add_by_adapter(out, rows, step, self.name)
        else:
            self.add_at_once(out, rows, step)

    def add_at_once(self, y: torch.Tensor, x: torch.Tensor, step: LoraStep) -> None:
        """Apply all adapters in two GEMMs, whatever their number: for devices where kernel launches dominate."""
        pairs = {lora: pair for lora in step.loras if (pair := lora.pairs.get(self.name)) is not None}
        if not pairs:
            return
        if self._stacked is None or self._stacked[0] != step.loras:
            both = Pair(torch.cat([p.down for p in pairs.values()]), torch.cat([p.up for p in pairs.values()], dim=1))
            self._stacked = step.loras, both
        down, up = self._stacked[1]
        ranks = [len(pairs[lora].down) if lora in pairs else 0 for lora in step.loras]
        mine = step.columns(ranks)
        # a mask, not a multiplication by 0 and 1: another adapter's values may have overflowed
        y += torch.where(mine, x @ down.T, 0) @ up.T


def add_by_adapter(y: torch.Tensor, x: torch.Tensor, step: LoraStep, name: str) -> None:
    """y [tokens, out_features] += B A x, adapter by adapter; x [tokens, in_features]."""
    for lora, rows in step.rows:
        pair = lora.pairs.get(name)
        if pair is None:
            continue
        if len(rows) == step.tokens:
            y += (x @ pair.down.T) @ pair.up.T
        else:
            y.index_add_(0, rows, (x[rows] @ pair.down.T) @ pair.up.T)


def wrap_linears(
    root: nn.Module,
    part: nn.Module,
    kinds: Collection[type[nn.Module]],
    features: Callable[[nn.Module], tuple[int, int]],
) -> tuple[LoraSwitch, dict[str, LoraLinear]]:
    """Wrap every `PreparedLinear` of `part`, and every layer whose type is in `kinds`, in a `LoraLinear`; returns their
    common switch, and the layers by their names in `root`. `features`: (in_features, out_features) of such a layer."""
    switch = LoraSwitch()
    inside = {id(module) for module in part.modules()}
    every = [(name, child) for name, child in root.named_modules() if id(child) in inside]
    found = [(name, child) for name, child in every if type(child) in kinds or isinstance(child, PreparedLinear)]
    layers: dict[str, LoraLinear] = {}
    for name, child in found:
        parent, _, leaf = name.rpartition(".")
        layers[name] = LoraLinear(child, name, *features(child), switch)
        setattr(root.get_submodule(parent), leaf, layers[name])
    return switch, layers
