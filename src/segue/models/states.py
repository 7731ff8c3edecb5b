"""Which modules of a decoder keep a state per sequence, and what it is: found by watching the library run.

Nothing here knows a mixer by name. The library's cache object for the config says whether any layer keeps a state; a
short text run with it shows which modules ask for states and what these look like. A second run, in two pieces, shows
whether several tokens go on from a state. Some modules (Mamba's selective scan) forget it there: with these it is tried
whether they go on where the state takes the place of the zeros they begin with (`segue.kernels.state_begun`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from segue.kernels.paged_attention import library_attention
from segue.kernels.state_begun import BegunWith
from segue.kernels.state_cache import Mixer
from segue.kernels.state_store import StateKey, StateLayout, StateTensor
from segue.messages.errors import ConfigError
from segue.models.library import (
    VERSION,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

_CACHES = ("past_key_values", "cache_params")
"""What decoders call their cache."""
_SAME = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest difference over largest value of a text in pieces; 16-bit types: 0.05."""


@dataclass(frozen=True, slots=True)
class States:
    """What was found."""

    layout: StateLayout
    mixers: tuple[str, ...]
    """Dotted names in the decoder."""
    cache: str
    """The argument of the decoder's forward."""
    begun: bool
    """Several tokens go on from a state where it takes the place of zeros."""


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether layers of such a decoder keep a state, by the library's own cache for it."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def attending(config: PreTrainedConfig) -> frozenset[int]:
    """The layers of such a decoder that keep keys and values."""
    layers = DynamicCache(config=config).layers
    return frozenset(place for place, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin))


class _Watched(DynamicCache):
    """The library's cache, which notes who asks it for states."""

    def __init__(self, config: PreTrainedConfig, watch: _Watch) -> None:
        super().__init__(config=config)
        self._watch = watch

    def get_conv_state(self, *where: Any, **named: Any) -> torch.Tensor | None:
        self._watch.asked()
        return super().get_conv_state(*where, **named)

    def get_recurrent_state(self, *where: Any, **named: Any) -> torch.Tensor | None:
        self._watch.asked()
        return super().get_recurrent_state(*where, **named)

    def update_conv_state(self, *given: Any, **named: Any) -> torch.Tensor:
        self._watch.asked()
        return super().update_conv_state(*given, **named)

    def update_recurrent_state(self, *given: Any, **named: Any) -> torch.Tensor:
        self._watch.asked()
        return super().update_recurrent_state(*given, **named)


class _Begun(DynamicCache):
    """The library's cache, with the recurrent states that the module which runs has asked for."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.asked: list[torch.Tensor] = []
        self._layer: int | None = None

    def get_recurrent_state(self, layer_idx: int, *where: Any, **named: Any) -> torch.Tensor | None:
        state = super().get_recurrent_state(layer_idx, *where, **named)
        if layer_idx != self._layer:
            self.asked.clear()
        self._layer = layer_idx
        if state is not None:
            self.asked.append(state)
        return state


@dataclass(slots=True)
class _Watch:
    """Which modules are running, the innermost last."""

    running: list[str] = field(default_factory=list)
    mixers: dict[str, None] = field(default_factory=dict)

    def asked(self) -> None:
        self.mixers[self.running[-1]] = None


@contextmanager
def _watching(decoder: nn.Module, watch: _Watch) -> Iterator[None]:
    hooks = []
    for name, module in decoder.named_modules():

        def enter(module: nn.Module, given: Any, name: str = name) -> None:
            watch.running.append(name)

        def leave(module: nn.Module, given: Any, out: Any) -> None:
            watch.running.pop()

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def find_states(decoder: PreTrainedModel, embeds: torch.Tensor, parameters: frozenset[str]) -> States:
    """Run a short text [tokens, H] by the library's forward, whose `parameters` are known, whole and in two pieces.

    Raises `ConfigError` where no states are seen.
    """
    cache = next((name for name in _CACHES if name in parameters), None)
    watch = _Watch()
    kept = _Watched(decoder.config, watch)

    def run(rows: torch.Tensor, start: int, cache_of: DynamicCache) -> torch.Tensor:
        places = {}
        if "position_ids" in parameters:
            places["position_ids"] = torch.arange(start, start + len(rows), device=rows.device)[None]
        with library_attention():
            out = decoder(inputs_embeds=rows[None], use_cache=True, **{str(cache): cache_of}, **places)
        return out.last_hidden_state[0]

    problem = ""
    if cache is not None:
        try:
            with _watching(decoder, watch):
                whole = run(embeds, 0, kept)
        except (TypeError, ValueError, AttributeError) as error:
            watch.mixers.clear()
            problem = f" ({error})"
    if cache is None or not watch.mixers or "" in watch.mixers:
        raise ConfigError(
            f"{type(decoder).__name__} of transformers {VERSION} cannot be served: its layers keep a state per "
            f"sequence, but not in the library's cache{problem}",
            field="architectures",
        )
    goes_on = _continues(run, embeds, whole, lambda: DynamicCache(config=decoder.config))
    begun = not goes_on and _continues(run, embeds, whole, lambda: _Begun(decoder.config))
    return States(StateLayout(tuple(_tensors(kept)), goes_on or begun), tuple(watch.mixers), cache, begun)


def _continues(
    run: Callable[[torch.Tensor, int, DynamicCache], torch.Tensor],
    embeds: torch.Tensor,
    whole: torch.Tensor,
    cache_of: Callable[[], DynamicCache],
) -> bool:
    """Whether a text [tokens, H] in two pieces gives what it gave `whole`, and the state between them matters."""
    middle = len(embeds) // 2

    def second(cache: DynamicCache) -> torch.Tensor:
        with BegunWith(cache.asked) if isinstance(cache, _Begun) else nullcontext():
            return run(embeds[middle:], middle, cache)

    pieces, emptied = cache_of(), cache_of()
    parts = [run(embeds[:middle], 0, pieces), second(pieces)]
    difference = float((torch.cat(parts) - whole).abs().max() / whole.abs().max())
    if not difference <= _SAME.get(embeds.dtype, 0.05):
        return False
    run(embeds[:middle], 0, emptied)
    # to the bit the same without a state: a difference that 16 bits might hide
    return not (_emptied(emptied) and torch.equal(second(emptied), parts[1]))


def _emptied(cache: DynamicCache) -> bool:
    """Zero its recurrent states; whether there are any."""
    layers = (layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin))
    states = [state for layer in layers for state in layer.recurrent_states.values() if state is not None]
    for state in states:
        state.zero_()
    return bool(states)


def _tensors(cache: DynamicCache) -> Iterator[StateTensor]:
    for layer, kept in enumerate(cache.layers):
        if not isinstance(kept, LinearAttentionCacheLayerMixin):
            continue
        for kind, states in (("conv", kept.conv_states), ("recurrent", kept.recurrent_states)):
            for index, state in states.items():
                if state is not None:
                    yield StateTensor(StateKey(layer, kind, index), tuple(state.shape[1:]), state.dtype)


def divide(decoder: nn.Module, states: States) -> None:
    """From now on its mixers are called once per group of a step's sequences."""
    for name in states.mixers:
        parent, _, leaf = name.rpartition(".")
        module = decoder.get_submodule(name)
        if not isinstance(module, Mixer):  # a module that several layers share
            setattr(decoder.get_submodule(parent), leaf, Mixer(module, begun=states.begun))
