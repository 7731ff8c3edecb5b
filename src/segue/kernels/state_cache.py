"""States of a step's sequences, as the cache that the mixers of `transformers` take.

The decoder runs one flat batch; a mixer (state space, linear attention, short convolution) mixes along a sequence, so
it is called once per group of sequences that are alike: decoding ones are rows of one batch. The module is the
library's. It is handed a cache that holds the group's states, and afterwards they are put back: some modules change
them in place, others give new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from segue.kernels.state_begun import BegunWith
from segue.kernels.state_store import StateGroup, StateKey, StateStep, StateStore


class _StateCache(Cache):
    """A cache as decoders ask about it: it keeps no keys and values, those are in blocks."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *others: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What paged attention gets: the step's own."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions come from outside."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """There is no mask."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def is_recording_past(self, *where: Any) -> bool:
        """Nothing is rolled back."""
        return False


class StepCache(_StateCache):
    """What a decoder's forward is given. Only `Mixer` reads what is in it."""

    def __init__(self, step: StateStep) -> None:
        super().__init__()
        self.step = step

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not all(group.fresh for group in self.step.groups)


class _Asked:
    """A list whose entries are had when they are asked for."""

    def __init__(self, entry: Callable[[int], Any]) -> None:
        self._entry = entry

    def __getitem__(self, number: int) -> Any:
        return self._entry(number)


class _LayerStates:
    """One layer of a `GroupCache`, as mixers of the library look at it that do not ask the cache (those of 5.17)."""

    record_past = False

    def __init__(self, cache: GroupCache, layer: int) -> None:
        self.conv_states = _Asked(partial(cache.get_conv_state, layer))
        self.recurrent_states = _Asked(partial(cache.get_recurrent_state, layer))


class GroupCache(_StateCache):
    """What a mixer is given for one group."""

    def __init__(self, store: StateStore, group: StateGroup) -> None:
        super().__init__()
        self.layers = _Asked(partial(_LayerStates, self))
        self._store = store
        self._group = group
        self._held: dict[StateKey, torch.Tensor] = {}
        self.asked: list[torch.Tensor] = []
        """Recurrent states that the mixer has asked for."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._group.fresh

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[sequences, channels, kernel size], to be changed in place."""
        return self._get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[sequences, …], to be changed in place."""
        state = self._get(StateKey(layer_idx, "recurrent", state_idx))
        if state is not None:
            self.asked.append(state)
        return state

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """[sequences, channels, tokens] → what the convolution goes over: with the state before it."""
        before = self.get_conv_state(layer_idx, state_idx)
        kept = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if before is not None:
            kept = before.shape[-1]
            conv_states = torch.cat([before, conv_states], dim=-1)
        elif conv_states.shape[-1] < kept:
            conv_states = pad(conv_states, (kept - conv_states.shape[-1], 0))
        self._held[StateKey(layer_idx, "conv", state_idx)] = conv_states[..., -kept:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> torch.Tensor:
        self._held[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def put_back(self) -> None:
        """Keep the states as they are now."""
        for key, states in self._held.items():
            self._store.write(key, self._group.slots, states)
            if self._group.kept is not None:
                rows, slots = self._group.kept
                self._store.write(key, slots, states.index_select(0, rows))

    def _get(self, key: StateKey) -> torch.Tensor | None:
        if key not in self._held:
            if self._group.fresh:
                return None
            self._held[key] = self._store.read(key, self._group.slots)
        return self._held[key]


class Mixer(nn.Module):
    """In the place of a module that keeps states: calls it once per group of a step."""

    def __init__(self, inner: nn.Module, *, begun: bool = False) -> None:
        """`begun`: it goes on from a state for several tokens where the state takes the place of the zeros that it
        begins with (`BegunWith`)."""
        super().__init__()
        self.inner = inner
        self._begun = begun

    @torch.compiler.disable  # groups differ from step to step
    def forward(self, *given: Any, **named: Any) -> Any:
        """As the module: what is [1, tokens, …] of its arguments and its output is cut into groups."""
        cache = next((value for value in (*given, *named.values()) if isinstance(value, StepCache)), None)
        if cache is None:
            return self.inner(*given, **named)
        named.pop("paged", None)  # of attention
        step = cache.step
        tokens = step.tokens
        whole: torch.Tensor | None = None
        for group in step.groups:
            own = GroupCache(step.store, group)
            rows = len(group.slots)

            def cut(value: Any, group: StateGroup = group, own: GroupCache = own, rows: int = rows) -> Any:
                if value is cache:
                    return own
                if isinstance(value, torch.Tensor) and value.shape[:2] == (1, tokens):
                    flat = value[0]
                    own_rows = flat[group.begin : group.end] if group.rows is None else flat[group.rows]
                    return own_rows.unflatten(0, (rows, -1))
                return value

            several = group.end - group.begin > rows
            begun = BegunWith(own.asked) if self._begun and several and not group.fresh else nullcontext()
            with begun:
                out = self.inner(*map(cut, given), **{name: cut(value) for name, value in named.items()})
            own.put_back()
            part = out.flatten(0, 1)
            if len(step.groups) == 1:
                return part[None]
            if whole is None:
                whole = part.new_empty(tokens, *part.shape[1:])
            if group.rows is None:
                whole[group.begin : group.end] = part
            else:
                whole[group.rows] = part
        assert whole is not None, "a step without tokens"
        return whole[None]
