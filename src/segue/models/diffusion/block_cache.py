"""First Block Cache and TeaCache, row by row: blocks that are taken to add what they did when they were last computed.

- First Block Cache (ParaAttention; the rule is diffusers' `first_block_cache`): all blocks but the first, where that
  one adds nearly what it did then.
- TeaCache (`segue.models.diffusion.teacache`): all blocks, where what goes into the first has changed little since.

The library's own hooks keep one decision and one memory per call. Here a call has rows of many requests, so its blocks
get hooks that decide for each row, by what is kept with its sample. Rows that differ in what they need are called
again, apart: the first block is computed once more for them, and nobody's result depends on a neighbour.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from segue.engines.diffusion.contract import Row
from segue.messages.diffusion import FIRST_BLOCK, TAYLORSEER, TEACACHE
from segue.messages.errors import InvalidRequest
from segue.models.diffusion.library import (
    BLOCK_LISTS,
    HookRegistry,
    ModelHook,
    TransformerBlockMetadata,
    TransformerBlockRegistry,
)
from segue.models.diffusion.teacache import TeaCache, signal_of
from segue.parallel.group import Group

_EMBEDDING = "temb"
"""What blocks call the timestep's embedding."""
THRESHOLD = 0.05
"""diffusers' default."""
_HOOK = "segue_block_cache"

Predict = Callable[[Sequence[Row]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of a row, from earlier calls."""

    seen: torch.Tensor
    """What the rule looks at: of the last call (TeaCache), or the last one that computed all blocks."""
    rest: torch.Tensor
    """What the blocks that can be left out added when they were last computed."""
    distance: float = 0.0
    """TeaCache: added up since then."""


class _Apart(Exception):
    """Some rows need all blocks, others do not; `computed` says which do."""

    def __init__(self, computed: list[bool]) -> None:
        super().__init__()
        self.computed = computed


@dataclass(slots=True)
class _Call:
    """A call of the network that is under way."""

    rows: Sequence[Row]
    kept: list[_Kept | None]
    """By row."""
    tea: TeaCache | None
    """None: the rule is that of the first block."""
    group: Group | None
    """Ranks that have a part of each row."""
    compute: bool | None = None
    """All blocks; None: not decided."""
    seen: torch.Tensor | None = None
    before: torch.Tensor | None = None
    """Hidden states in front of what can be left out."""
    rest: torch.Tensor | None = None
    distances: list[float] = field(default_factory=list)

    def decide(self, seen: torch.Tensor) -> bool:
        """`seen`: [rows, …], what the rule looks at. Raises `_Apart`."""
        if len(seen) != len(self.kept):
            raise AssertionError(f"a call of {len(self.kept)} rows gave the first block {len(seen)}")
        self.seen = seen
        answers = self._needed(seen)
        if self.compute is None:
            if any(answers) and not all(answers):
                raise _Apart(answers)
            self.compute = answers[0]
        return self.compute

    def rests(self) -> torch.Tensor:
        """What is guessed, of all rows."""
        return torch.cat([kept.rest for kept in self.kept if kept is not None])

    def keep(self, place: int) -> _Kept:
        """Of a row, when the call is over."""
        assert self.seen is not None
        own = slice(place, place + 1)
        if self.compute:
            assert self.rest is not None
            return _Kept(self.seen[own].clone(), self.rest[own].clone())
        kept = self.kept[place]
        assert kept is not None, "a row of which nothing is kept is computed"
        return kept if self.tea is None else _Kept(self.seen[own].clone(), kept.rest, self.distances[place])

    def _needed(self, seen: torch.Tensor) -> list[bool]:
        known = [place for place, kept in enumerate(self.kept) if kept is not None]
        answers, self.distances = [True] * len(self.kept), [0.0] * len(self.kept)
        if known:
            before = torch.cat([kept.seen for kept in self.kept if kept is not None])
            sums = torch.stack([one.abs().flatten(1).float().sum(1) for one in (seen[known] - before, before)])
            if self.group is not None:  # each rank has a part of a row, and all must decide alike
                self.group.all_reduce(sums)
            for place, change in zip(known, (sums[0] / sums[1]).tolist(), strict=True):
                answers[place] = self._due(place, change)
        return answers

    def _due(self, place: int, change: float) -> bool:
        sample, kept = self.rows[place].sample, self.kept[place]
        assert kept is not None
        if self.tea is None:
            return not change <= (sample.params.step_cache_threshold or THRESHOLD)
        self.distances[place] = kept.distance + self.tea.rescaled(change)
        threshold = sample.params.step_cache_threshold or self.tea.threshold
        return self.tea.always(sample.step, len(sample.timesteps)) or not self.distances[place] < threshold


class _Holder:
    """What the hooks of all blocks of a network look at; no call: they do nothing."""

    def __init__(self) -> None:
        self.call: _Call | None = None


class BlockCache:
    """Over the networks of one adapter."""

    def __init__(
        self, networks: Sequence[nn.Module], *, tea: TeaCache | None = None, group: Group | None = None
    ) -> None:
        """`tea`: the rule of TeaCache, where there is one; `group`: the ranks that have a part of each call.
        Raises `InvalidRequest` where one is not made of blocks that diffusers knows."""
        self._holders = [_holder(network) for network in networks]
        self._tea = tea
        self._group = group

    def predict(self, rows: Sequence[Row], predict: Predict, network: Hashable) -> Sequence[torch.Tensor]:
        """`predict` of `rows`, all of one rule; `network`: what is different for another one, of two experts."""
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
        tea = self._tea if rows[0].sample.params.step_cache == TEACACHE else None
        kept = [row.sample.step_cache.get((network, row.branch)) for row in rows]
        call = _Call(rows, kept, tea, self._group, compute)
        for holder in self._holders:
            holder.call = call
        try:
            predictions = list(predict(rows))
        finally:
            for holder in self._holders:
                holder.call = None
        for place, row in enumerate(rows):
            row.sample.step_cache[network, row.branch] = call.keep(place)
        return predictions


class _First(ModelHook):
    """The first block: it decides. TeaCache leaves it out with the others."""

    def __init__(self, holder: _Holder, block: nn.Module, known: TransformerBlockMetadata) -> None:
        super().__init__()
        self.holder = holder
        self._known = known
        self._taken = _Place.of(block, known.hidden_states_argument_name)
        self._text = _Place.of(block, known.encoder_hidden_states_argument_name)
        self._embedding = _Place.of(block, _EMBEDDING)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.holder.call
        if call is None:
            return self.fn_ref.original_forward(*args, **kwargs)
        hidden = self._taken.find(args, kwargs)
        if call.tea is not None:
            if not call.decide(signal_of(module)(module, hidden, self._embedding.find(args, kwargs))):
                return _passed(hidden + call.rests(), self._text, self._known, args, kwargs)
            call.before = hidden
            return self.fn_ref.original_forward(*args, **kwargs)
        output = self.fn_ref.original_forward(*args, **kwargs)
        call.before = _hidden(output, self._known)
        if call.decide(call.before - hidden):
            return output
        return _with_hidden(output, self._known, call.before + call.rests())


class _Other(ModelHook):
    """A block that is computed where the first has said so."""

    def __init__(self, holder: _Holder, block: nn.Module, known: TransformerBlockMetadata, *, last: bool) -> None:
        super().__init__()
        self.holder = holder
        self._known = known
        self._taken = _Place.of(block, known.hidden_states_argument_name)
        self._text = _Place.of(block, known.encoder_hidden_states_argument_name)
        self._last = last

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.holder.call
        if call is None or call.compute:
            output = self.fn_ref.original_forward(*args, **kwargs)
            if call is not None and self._last:
                assert call.before is not None
                call.rest = _hidden(output, self._known) - call.before
            return output
        return _passed(self._taken.find(args, kwargs), self._text, self._known, args, kwargs)


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


def _passed(
    hidden: torch.Tensor, text: _Place, known: TransformerBlockMetadata, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a block that is left out gives, in the form of its output."""
    if known.return_encoder_hidden_states_index is None:
        return hidden
    pair = [hidden, hidden]
    # the text's stream is read by blocks alone, and there are none behind
    pair[known.return_encoder_hidden_states_index] = text.find(args, kwargs)
    return tuple(pair)


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


def hook_blocks(network: nn.Module) -> bool:
    """Put the hooks over the blocks of a network, that whatever else wraps them is around these; whether it is made of
    blocks."""
    blocks = _blocks(network)
    holder, last = _Holder(), len(blocks) - 1
    for place, (block, known) in enumerate(blocks):
        hook: ModelHook = (
            _First(holder, block, known) if place == 0 else _Other(holder, block, known, last=place == last)
        )
        HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, _HOOK)
    return bool(blocks)


def _holder(network: nn.Module) -> _Holder:
    """Of a network's hooks, which are made where there are none."""
    blocks = _blocks(network)
    if blocks:
        first = HookRegistry.check_if_exists_or_initialize(blocks[0][0])
        if first.get_hook(_HOOK) is None:
            hook_blocks(network)
        hook = first.get_hook(_HOOK)
        assert isinstance(hook, _First)
        return hook.holder
    raise InvalidRequest(
        f"step_cache is {FIRST_BLOCK!r} or {TEACACHE!r}, but {type(network).__name__} is not made of a row of "
        f"transformer blocks; this model has {TAYLORSEER}",
        field="step_cache",
    )


def first_block(network: nn.Module) -> nn.Module | None:
    """None: it is not made of blocks."""
    blocks = _blocks(network)
    return blocks[0][0] if blocks else None


def _blocks(network: nn.Module) -> list[tuple[nn.Module, TransformerBlockMetadata]]:
    """The blocks in the order they run, and where diffusers says that their tensors are; none where it does not."""
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
    return list(zip(found, known, strict=True)) if len(known) > 1 else []


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
