"""First Block Cache and TeaCache, per row: skip blocks and add the residual of their last computation instead.

- First Block Cache (ParaAttention; the rule is diffusers' `first_block_cache`): skips all blocks but the first if the
  first adds nearly the same as it did then.
- TeaCache (`segue.models.shared.diffusion.denoiser.teacache`): skips all blocks if the first block's input has changed
  little since then.

The library's own hooks keep one decision and one residual per call. Here a call has rows of many requests, so the hooks
decide for each row, with the state kept in its sample. If rows of a call disagree, they are called again separately:
the first block is computed once more for them, and no result depends on other rows.
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
from segue.models.shared.diffusion.denoiser.teacache import TeaCache, signal_of
from segue.models.shared.diffusion.library import (
    BLOCK_LISTS,
    HookRegistry,
    ModelHook,
    TransformerBlockMetadata,
    TransformerBlockRegistry,
)
from segue.parallel.group import Group

_EMBEDDING = "temb"
"""Name of the blocks' timestep embedding argument."""
THRESHOLD = 0.05
"""The default threshold of diffusers."""
_HOOK = "segue_block_cache"

Predict = Callable[[Sequence[Row]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A row's state from earlier calls."""

    seen: torch.Tensor
    """The rule's signal: of the last call (TeaCache), or of the last call that computed all blocks."""
    rest: torch.Tensor
    """The residual: the sum that the skippable blocks added when last computed."""
    distance: float = 0.0
    """TeaCache: change accumulated since then."""


class _Apart(Exception):
    """Some rows need all blocks, others do not; `computed` says which do."""

    def __init__(self, computed: list[bool]) -> None:
        super().__init__()
        self.computed = computed


@dataclass(slots=True)
class _Call:
    """A running call of the network."""

    rows: Sequence[Row]
    kept: list[_Kept | None]
    """One entry per row."""
    tea: TeaCache | None
    """None: use the First Block Cache rule."""
    group: Group | None
    """Ranks that hold a part of each row."""
    compute: bool | None = None
    """Compute all blocks; None: not decided yet."""
    seen: torch.Tensor | None = None
    before: torch.Tensor | None = None
    """Hidden states before the skippable blocks."""
    rest: torch.Tensor | None = None
    distances: list[float] = field(default_factory=list)

    def decide(self, seen: torch.Tensor) -> bool:
        """Decide whether to compute all blocks. `seen`: [rows, …], the rule's signal. Raises `_Apart` if rows
        disagree."""
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
        """The cached residuals of all rows."""
        return torch.cat([kept.rest for kept in self.kept if kept is not None])

    def keep(self, place: int) -> _Kept:
        """The new state of a row, after the call."""
        assert self.seen is not None
        own = slice(place, place + 1)
        if self.compute:
            assert self.rest is not None
            return _Kept(self.seen[own].clone(), self.rest[own].clone())
        kept = self.kept[place]
        assert kept is not None, "a row without a kept state is computed"
        return kept if self.tea is None else _Kept(self.seen[own].clone(), kept.rest, self.distances[place])

    def _needed(self, seen: torch.Tensor) -> list[bool]:
        known = [place for place, kept in enumerate(self.kept) if kept is not None]
        answers, self.distances = [True] * len(self.kept), [0.0] * len(self.kept)
        if known:
            before = torch.cat([kept.seen for kept in self.kept if kept is not None])
            sums = torch.stack([one.abs().flatten(1).float().sum(1) for one in (seen[known] - before, before)])
            if self.group is not None:  # each rank holds a part of a row, and all must reach the same decision
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
    """Shares the current call with the hooks of a network's blocks; without a call the hooks do nothing."""

    def __init__(self) -> None:
        self.call: _Call | None = None


class BlockCache:
    """The block cache over the networks of one stage model."""

    def __init__(
        self, networks: Sequence[nn.Module], *, tea: TeaCache | None = None, group: Group | None = None
    ) -> None:
        """`tea`: the TeaCache rule, if any; `group`: the ranks that share each call. Raises `InvalidRequest` if a
        network does not consist of blocks that diffusers knows."""
        self._holders = [_holder(network) for network in networks]
        self._tea = tea
        self._group = group

    def predict(self, rows: Sequence[Row], predict: Predict, network: Hashable) -> Sequence[torch.Tensor]:
        """Predict for `rows`, all under one rule; `network` tells apart the states of different experts."""
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
    """The hook of the first block, which decides. TeaCache skips this block too."""

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
    """The hook of a later block, which runs only if the first decided so."""

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
    """The position of a tensor argument in a block's forward."""

    name: str
    position: int

    @classmethod
    def of(cls, block: nn.Module, name: str) -> _Place:
        """Find argument `name`; if there is none, the block takes a single stream: its first argument."""
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        return cls(name, names.index(name)) if name in names else cls(names[0], 0)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[self.name] if self.name in kwargs else args[self.position]


def _passed(
    hidden: torch.Tensor, text: _Place, known: TransformerBlockMetadata, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The output of a skipped block, in the block's output format."""
    if known.return_encoder_hidden_states_index is None:
        return hidden
    pair = [hidden, hidden]
    # only blocks read the text stream, and all later blocks are skipped
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
    """Hook the blocks of a network, so that all other wrappers are outside of the hooks. Returns whether it has
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
    """The holder of a network's hooks, which are added if missing."""
    blocks = _blocks(network)
    if blocks:
        first = HookRegistry.check_if_exists_or_initialize(blocks[0][0])
        if first.get_hook(_HOOK) is None:
            hook_blocks(network)
        hook = first.get_hook(_HOOK)
        assert isinstance(hook, _First)
        return hook.holder
    raise InvalidRequest(
        f"step_cache is {FIRST_BLOCK!r} or {TEACACHE!r}, but {type(network).__name__} is not a sequence of "
        f"transformer blocks; this model has {TAYLORSEER}",
        field="step_cache",
    )


def first_block(network: nn.Module) -> nn.Module | None:
    """The first block, None if the network has none."""
    blocks = _blocks(network)
    return blocks[0][0] if blocks else None


def _blocks(network: nn.Module) -> list[tuple[nn.Module, TransformerBlockMetadata]]:
    """The blocks in execution order with diffusers' metadata of their tensors; empty if diffusers has no metadata."""
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
    """Indices of rows grouped by equal shapes of conditions: each group shares a call without padding."""
    groups: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(_shape(row.condition), []).append(place)
    return list(groups.values())


def _shape(value: Any) -> Hashable:
    """Replace tensors by their shapes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    if is_dataclass(value):
        return tuple(_shape(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return tuple((name, _shape(part)) for name, part in value.items())
    return value if isinstance(value, Hashable) else id(value)
