"""Find the modules of a decoder that keep a state per sequence, and the state's layout, by watching the library run.

No mixer is known by name. The library's cache object for the config shows whether any layer keeps a state; a short text
run with it shows which modules ask for states, and their shapes. A second run, in two pieces, shows whether several
tokens continue from a state. Some modules (Mamba's selective scan) forget the state there: for these it is tested
whether they continue if the state replaces their initial zeros (`segue.kernels.kv.state_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from segue.kernels.attention.paged_attention import library_attention
from segue.kernels.kv.state_cache import BegunWith, Mixer
from segue.kernels.kv.states import StateKey, StateLayout, StateTensor
from segue.messages.errors import ConfigError
from segue.models.shared.library import (
    VERSION,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

_CACHES = ("past_key_values", "cache_params")
"""Names of the cache argument in decoders' forwards."""
_SAME = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest allowed difference, relative to the largest value, of a text run in pieces; 16-bit types: 0.05."""


@dataclass(frozen=True, slots=True)
class States:
    """The states of a decoder, as found."""

    layout: StateLayout
    mixers: tuple[str, ...]
    """Dotted names in the decoder."""
    cache: str
    """The cache argument of the decoder's forward."""
    begun: bool
    """Several tokens continue from a state only if it replaces the initial zeros."""


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether layers of such a decoder keep a state, according to the library's own cache for its config."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def attending(config: PreTrainedConfig) -> frozenset[int]:
    """The layers of such a decoder that keep keys and values."""
    layers = DynamicCache(config=config).layers
    return frozenset(place for place, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin))


class _Watched(DynamicCache):
    """The library's cache, extended to note which modules ask for states."""

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
    """The library's cache, extended to note the recurrent states that the running module has asked for."""

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
    """Tracks which modules are running, the innermost last."""

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
    """Run a short text [tokens, H] through the library's forward (which has these `parameters`), whole and in pieces.

    Raises `ConfigError` if no states are found.
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
    """Whether a text [tokens, H] in two pieces gives the same as `whole`, and the state between them matters."""
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
    # an exactly equal result without a state means that the state had no effect, which a 16-bit tolerance might hide
    return not (_emptied(emptied) and torch.equal(second(emptied), parts[1]))


def _emptied(cache: DynamicCache) -> bool:
    """Zero the recurrent states; returns whether there are any."""
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
    """Make the decoder's mixers run once per group of a step's sequences."""
    for name in states.mixers:
        parent, _, leaf = name.rpartition(".")
        module = decoder.get_submodule(name)
        if not isinstance(module, Mixer):  # otherwise several layers share this module and it is wrapped already
            setattr(decoder.get_submodule(parent), leaf, Mixer(module, begun=states.begun))
