"""Which tokens of a prompt see each other in both directions: read off the masks that the model gives its decoder.

A model that has such tokens (a picture's, in Gemma 3) says so in the masks its forward makes of the processor's token
types. Here the forward is run up to the decoder, over a text with two media of a kind, and its masks are compared with
the two that the engine does: causal, and causal but for each run of media tokens, which sees all of itself; either of
them within a sliding window.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from segue.messages.errors import ConfigError
from segue.models.library import VERSION, PreTrainedModel
from segue.models.multimodal_lm.loading import taken_by
from segue.models.multimodal_lm.processor import Processed, Processor

_TYPES = frozenset(("token_type_ids", "mm_token_type_ids"))
"""How a forward is told which tokens are a medium's."""


class _AtDecoder(Exception):
    """The decoder was called."""


@dataclass(frozen=True, slots=True)
class MaskProbe:
    """A model that holds encoders and decoder together, to be run up to the decoder."""

    kind: str
    """Its class, for errors."""
    inner: nn.Module
    decoder: PreTrainedModel
    processor: Processor
    device: torch.device
    dtype: torch.dtype

    def mutual_kinds(self) -> frozenset[str]:
        """The kinds of media whose tokens see each other. Raises `ConfigError` for other masks."""
        names = inspect.signature(self.inner.forward).parameters.keys()
        return frozenset(kind for kind in self.processor.kinds if names & _TYPES and self._mutual(kind))

    def _mutual(self, kind: str) -> bool:
        placeholder = self.processor.placeholders[kind]
        media = [self.processor.example(kind, seed) for seed in range(2)]
        made = self.processor(f"a {placeholder} b {placeholder} c", {kind: media})
        both = mutual_seen(len(made.ids), runs(made.places(kind)))
        found = {mask is not None and self._is_both(mask, both) for mask in self._masks(made, kind)}
        if len(found) > 1:
            raise self._unserved(f"tokens of {kind} see each other in both directions in some of its layers only")
        return found.pop()

    def _is_both(self, seen: torch.Tensor, both: torch.Tensor) -> bool:
        """Whether media tokens see each other by this mask."""
        causal = torch.ones_like(both).tril()
        config = self.decoder.config
        window: int | None = config.sliding_window if "sliding_window" in config else None
        for near in (torch.ones_like(both), *(() if window is None else (torch.ones_like(both).triu(1 - window),))):
            if torch.equal(seen, causal & near):
                return False
            if torch.equal(seen, both & near):
                return True
        raise self._unserved("it gives its decoder masks of its own for media, which are neither causal nor so within")

    @torch.inference_mode()
    def _masks(self, made: Processed, kind: str) -> list[torch.Tensor | None]:
        """[T, T] bool, true where a query (row) sees a key, of every mask; None: the decoder is left to make it."""
        given: list[Any] = []

        def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            given.append(kwargs.get("attention_mask"))
            raise _AtDecoder

        ids = torch.tensor([made.ids], device=self.device)
        types = torch.tensor([made.token_types], device=self.device) if made.token_types is not None else None
        tensors = moved(made.tensors[kind], self.device, self.dtype)
        arguments = {**tensors, **dict.fromkeys(_TYPES, types), "attention_mask": torch.ones_like(ids)}
        hook = self.decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.inner(input_ids=ids, use_cache=False, **taken_by(self.inner.forward, arguments))
        except _AtDecoder:
            pass
        finally:
            hook.remove()
        masks = given[0].values() if isinstance(given[0], dict) else [given[0]]
        return [_seen(mask) if mask is not None and mask.ndim == 4 else None for mask in masks]

    def _unserved(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.kind} of transformers {VERSION} cannot be served: {reason}", field="architectures")


def runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending places → [start, stop) of those that follow each other."""
    borders = [index for index, (one, other) in enumerate(pairwise(places), 1) if other != one + 1]
    return [(places[begin], places[end - 1] + 1) for begin, end in pairwise([0, *borders, len(places)]) if end > begin]


def mutual_seen(length: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """[length, length] bool: causal, but each span sees all of itself."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for start, stop in spans:
        seen[start:stop, start:stop] = True
    return seen


def moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors on the device, numbers with a point in the model's type, as `BatchFeature.to` does."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {key: moved(item, device, dtype) for key, item in value.items()}
    return [moved(item, device, dtype) for item in value] if isinstance(value, list) else value


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """Of a mask [1, 1, T, T], boolean or additive."""
    return (mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0).cpu()
