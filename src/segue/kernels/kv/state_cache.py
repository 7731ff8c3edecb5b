"""Presents the states of a step's sequences as the cache interface that mixers of `transformers` use.

The decoder runs one flat batch; a mixer (state space, linear attention, short convolution) mixes along a sequence, so
it is called once per group of similar sequences: decoding ones are rows of one batch. The module is the library's. It
receives a cache that holds the group's states, which are written back afterwards: some modules change them in place,
others return new ones.

`BegunWith` continues from a state with several tokens in modules that support this for a single token only: the
selective scan of `transformers` (Mamba, Falcon-Mamba, Jamba) starts several tokens with a state of zeros, like the
kernel that it stands for, even if it has read the previous state from its cache. Apart from these zeros it computes the
same, so the state replaces them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from segue.kernels.kv.states import StateGroup, StateKey, StateStep, StateStore

_ZEROS = (torch.zeros, torch.zeros_like, torch.Tensor.new_zeros)


class BegunWith(TorchFunctionMode):
    """Within it, the first zeros with exactly the shape of a state are replaced by that state, once for each. Users
    must compare the results with an uninterrupted run. Calls of torch take a little longer: a mixer of Mamba 5%."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        """`states`: those that the module has read from its cache so far; used ones are removed. They keep their own
        dtype, and may be changed in place."""
        super().__init__()
        self._states = states

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._states and func in _ZEROS:
            for place, state in enumerate(self._states):
                if state.shape == made.shape:
                    return self._states.pop(place)
        return made


class _StateCache(Cache):
    """The cache interface for decoders. It holds no keys and values, which are in blocks."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *others: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's own keys and values, for paged attention."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, because positions are passed in from outside."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """No mask is built from these sizes."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def is_recording_past(self, *where: Any) -> bool:
        """False, because nothing is rolled back."""
        return False


class StepCache(_StateCache):
    """The cache passed to a decoder's forward. Only `Mixer` reads its contents."""

    def __init__(self, step: StateStep) -> None:
        super().__init__()
        self.step = step

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not all(group.fresh for group in self.step.groups)


class _Asked:
    """A lazily evaluated list."""

    def __init__(self, entry: Callable[[int], Any]) -> None:
        self._entry = entry

    def __getitem__(self, number: int) -> Any:
        return self._entry(number)


class _LayerStates:
    """One layer of a `GroupCache`, for mixers of the library that access layers directly (those of 5.17)."""

    record_past = False

    def __init__(self, cache: GroupCache, layer: int) -> None:
        self.conv_states = _Asked(partial(cache.get_conv_state, layer))
        self.recurrent_states = _Asked(partial(cache.get_recurrent_state, layer))


class GroupCache(_StateCache):
    """The cache passed to a mixer for one group."""

    def __init__(self, store: StateStore, group: StateGroup) -> None:
        super().__init__()
        self.layers = _Asked(partial(_LayerStates, self))
        self._store = store
        self._group = group
        self._held: dict[StateKey, torch.Tensor] = {}
        self.asked: list[torch.Tensor] = []
        """Recurrent states that the mixer has read."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._group.fresh

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[sequences, channels, kernel size], may be changed in place."""
        return self._get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[sequences, …], may be changed in place."""
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
        """[sequences, channels, tokens] → the convolution's input, including the previous state."""
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
        """Write the current states to the store."""
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
    """Replaces a module with state: calls it once per group of a step."""

    def __init__(self, inner: nn.Module, *, begun: bool = False) -> None:
        """`begun`: it continues from a state with several tokens if the state replaces its initial zeros
        (`BegunWith`)."""
        super().__init__()
        self.inner = inner
        self._begun = begun

    @torch.compiler.disable  # groups differ from step to step
    def forward(self, *given: Any, **named: Any) -> Any:
        """Like the module's; arguments and output of shape [1, tokens, …] are split into groups."""
        cache = next((value for value in (*given, *named.values()) if isinstance(value, StepCache)), None)
        if cache is None:
            return self.inner(*given, **named)
        named.pop("paged", None)  # for attention
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
