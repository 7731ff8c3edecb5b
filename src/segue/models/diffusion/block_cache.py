"""First Block Cache, row by row: where the first block adds nearly what it did when all blocks were last computed, the
others are taken to add what they did then (ParaAttention; the rule is diffusers' `first_block_cache`).

The library's own hooks keep one decision and one memory per call. Here a call has rows of many requests, so its blocks
get hooks that decide for each row, by what is kept with its sample. Rows that differ in what they need are called
again, apart: the first block is computed once more for them, and nobody's result depends on a neighbour.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from segue.engines.diffusion.contract import Row
from segue.messages.diffusion import FIRST_BLOCK, TAYLORSEER
from segue.messages.errors import InvalidRequest
from segue.models.diffusion.library import (
    BLOCK_LISTS,
    HookRegistry,
    ModelHook,
    TransformerBlockMetadata,
    TransformerBlockRegistry,
)

THRESHOLD = 0.05
"""diffusers' default."""

Predict = Callable[[Sequence[Row]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of a row, from the last call that computed all blocks: what the first added, and what the others did."""

    first: torch.Tensor
    rest: torch.Tensor


class _Apart(Exception):
    """Some rows need all blocks, others do not; `computed` says which do."""

    def __init__(self, computed: list[bool]) -> None:
        super().__init__()
        self.computed = computed


@dataclass(slots=True)
class _Call:
    """A call of the network that is under way."""

    kept: list[_Kept | None]
    """By row."""
    thresholds: list[float]
    compute: bool | None = None
    """All blocks; None: not decided."""
    first: torch.Tensor | None = None
    behind_first: torch.Tensor | None = None
    rest: torch.Tensor | None = None

    def decide(self, first: torch.Tensor) -> bool:
        """`first`: [rows, …], what the first block added. Raises `_Apart`."""
        if len(first) != len(self.kept):
            raise AssertionError(f"a call of {len(self.kept)} rows gave the first block {len(first)}")
        if self.compute is None:
            answers = self._needed(first)
            if any(answers) and not all(answers):
                raise _Apart(answers)
            self.compute = answers[0]
        return self.compute

    def _needed(self, first: torch.Tensor) -> list[bool]:
        known = [place for place, kept in enumerate(self.kept) if kept is not None]
        answers = [True] * len(self.kept)
        if known:
            before = torch.cat([kept.first for kept in self.kept if kept is not None])
            change = (first[known] - before).abs().flatten(1).mean(1) / before.abs().flatten(1).mean(1)
            for place, value in zip(known, change.tolist(), strict=True):
                answers[place] = value > self.thresholds[place]
        return answers


class _Holder:
    """What the hooks of all blocks look at; no call: they do nothing."""

    def __init__(self) -> None:
        self.call: _Call | None = None


class BlockCache:
    """Over the networks of one adapter."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Raises `InvalidRequest` where one is not made of blocks that diffusers knows."""
        self._holder = _Holder()
        for blocks in [_blocks(network) for network in networks]:
            last = len(blocks) - 1
            for place, (block, known) in enumerate(blocks):
                hook: ModelHook = (
                    _First(self._holder, block, known)
                    if place == 0
                    else _Other(self._holder, block, known, last=place == last)
                )
                HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, "segue_first_block")

    def predict(self, rows: Sequence[Row], predict: Predict, network: Hashable) -> Sequence[torch.Tensor]:
        """`predict` of `rows`; `network`: what is different for another one, of two experts."""
        answers: dict[int, torch.Tensor] = {}
        for places in _alike(rows):
            group = [rows[place] for place in places]
            try:
                made = self._call(group, predict, network)
            except _Apart as decided:
                made = [torch.empty(0)] * len(group)
                for compute in (True, False):
                    own = [place for place, needed in enumerate(decided.computed) if needed == compute]
                    part = self._call([group[place] for place in own], predict, network, compute)
                    for place, prediction in zip(own, part, strict=True):
                        made[place] = prediction
            answers.update(zip(places, made, strict=True))
        return [answers[place] for place in range(len(rows))]

    def _call(
        self, rows: Sequence[Row], predict: Predict, network: Hashable, compute: bool | None = None
    ) -> list[torch.Tensor]:
        call = _Call(
            [row.sample.step_cache.get((network, row.branch)) for row in rows],
            [row.sample.params.step_cache_threshold or THRESHOLD for row in rows],
            compute,
        )
        self._holder.call = call
        try:
            predictions = list(predict(rows))
        finally:
            self._holder.call = None
        if call.compute:
            assert call.first is not None
            assert call.rest is not None
            for place, row in enumerate(rows):
                own = slice(place, place + 1)
                row.sample.step_cache[network, row.branch] = _Kept(call.first[own].clone(), call.rest[own].clone())
        return predictions


class _First(ModelHook):
    """The first block: it is always computed, and decides."""

    def __init__(self, holder: _Holder, block: nn.Module, known: TransformerBlockMetadata) -> None:
        super().__init__()
        self._holder = holder
        self._known = known
        self._taken = _Place.of(block, known.hidden_states_argument_name)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = self.fn_ref.original_forward(*args, **kwargs)
        call = self._holder.call
        if call is None:
            return output
        after = _hidden(output, self._known)
        added = after - self._taken.find(args, kwargs)
        if call.decide(added):
            call.first, call.behind_first = added, after
            return output
        rest = torch.cat([kept.rest for kept in call.kept if kept is not None])
        return _with_hidden(output, self._known, after + rest)


class _Other(ModelHook):
    """A block that is computed where the first has said so."""

    def __init__(self, holder: _Holder, block: nn.Module, known: TransformerBlockMetadata, *, last: bool) -> None:
        super().__init__()
        self._holder = holder
        self._known = known
        self._taken = _Place.of(block, known.hidden_states_argument_name)
        self._text = _Place.of(block, known.encoder_hidden_states_argument_name)
        self._last = last

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self._holder.call
        if call is None or call.compute:
            output = self.fn_ref.original_forward(*args, **kwargs)
            if call is not None and self._last:
                assert call.behind_first is not None
                call.rest = _hidden(output, self._known) - call.behind_first
            return output
        hidden = self._taken.find(args, kwargs)
        if self._known.return_encoder_hidden_states_index is None:
            return hidden
        # the text's stream is read by blocks alone, and there are none behind
        text = self._text.find(args, kwargs)
        pair = [hidden, hidden]
        pair[self._known.return_encoder_hidden_states_index] = text
        return tuple(pair)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block takes a tensor."""

    name: str
    position: int

    @classmethod
    def of(cls, block: nn.Module, name: str) -> _Place:
        """The first argument, where none is called that: then the block takes one stream alone."""
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        return cls(name, names.index(name)) if name in names else cls(names[0], 0)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[self.name] if self.name in kwargs else args[self.position]


def _hidden(output: Any, known: TransformerBlockMetadata) -> torch.Tensor:
    hidden = output[known.return_hidden_states_index] if isinstance(output, tuple) else output
    assert isinstance(hidden, torch.Tensor)
    return hidden


def _with_hidden(output: Any, known: TransformerBlockMetadata, hidden: torch.Tensor) -> Any:
    if not isinstance(output, tuple):
        return hidden
    parts = list(output)
    parts[known.return_hidden_states_index] = hidden
    return tuple(parts)


def _blocks(network: nn.Module) -> list[tuple[nn.Module, TransformerBlockMetadata]]:
    """The blocks in the order they run, and where diffusers says that their tensors are."""
    found = [
        block
        for name, child in network.named_children()
        if name in BLOCK_LISTS and isinstance(child, nn.ModuleList)
        for block in child
    ]
    try:
        known = [TransformerBlockRegistry.get(type(block)) for block in found]
    except ValueError:
        known = []
    if len(known) < 2:
        raise InvalidRequest(
            f"step_cache is {FIRST_BLOCK!r}, but {type(network).__name__} is not made of a row of transformer blocks; "
            f"this model has {TAYLORSEER}",
            field="step_cache",
        )
    return list(zip(found, known, strict=True))


def _alike(rows: Sequence[Row]) -> list[list[int]]:
    """Places of rows with conditions of equal shapes: they are in one call of the network, none of them padded."""
    groups: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(_shape(row.condition), []).append(place)
    return list(groups.values())


def _shape(value: Any) -> Hashable:
    """Shapes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    if is_dataclass(value):
        return tuple(_shape(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return tuple((name, _shape(part)) for name, part in value.items())
    return value if isinstance(value, Hashable) else id(value)
