"""Find the bidirectional spans of a prompt, by inspecting the attention masks that the model passes to its decoder.

A model with bidirectional spans (an image's tokens, in Gemma 3) builds such masks in its forward from the processor's
token types. Here the forward runs up to the decoder on a text with two media of one kind, and its masks are compared
with those that the engine supports: causal; causal with each run of media tokens fully visible to itself; either of
them within a sliding window; and a fully bidirectional prompt (PaliGemma). The same run shows whether media change the
rows of other tokens than their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from segue.messages.errors import ConfigError
from segue.models.omni.multimodal_lm.loading import taken_by
from segue.models.omni.multimodal_lm.processor import TYPES, Processed, Processor
from segue.models.shared.decoder.interface import cannot_be_served
from segue.models.shared.library import PreTrainedConfig, PreTrainedModel

CAUSAL, MEDIA, BEYOND, WHOLE, OTHER = "causal", "media", "beyond", "whole", "other"
"""The kinds of masks that `read_mask` tells apart."""


FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, StopIteration)
"""Exceptions of a forward that needs more than placeholders and the processor's tensors."""


Rows = Callable[[torch.Tensor, Iterable[str]], torch.Tensor]
"""Ids [n] of a prompt with media of some kinds → their rows [n, H]."""


class _AtDecoder(Exception):
    """Stops the forward when it calls the decoder."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The bidirectional spans of prompts with media."""

    kinds: frozenset[str] = frozenset()
    """Kinds of media each of whose runs of tokens is a bidirectional span."""
    whole: bool = False
    """The whole prompt is one span, text included."""
    beyond: bool = False
    """Spans ignore sliding windows: a medium longer than the window is refused."""
    types: frozenset[str] = frozenset()
    """Layer types with bidirectional spans; empty: all layers."""

    def layers(self, config: PreTrainedConfig) -> frozenset[int]:
        """The layers with bidirectional spans. Raises `ConfigError` if the config does not state the layer types."""
        if not self.kinds:
            return frozenset()
        if not self.types:
            return frozenset(range(config.num_hidden_layers))
        types: list[str] = (config.layer_types if "layer_types" in config else None) or []
        if not self.types <= set(types):
            raise cannot_be_served(
                config.model_type,
                f"tokens of {', '.join(sorted(self.kinds))} are bidirectional in layers of type "
                f"{', '.join(sorted(self.types))}, and its config does not state which those are",
            )
        return frozenset(layer for layer, name in enumerate(types) if name in self.types)

    def spans(self, units: Sequence[Mapping[str, Any]], length: int) -> list[tuple[int, int]]:
        """The bidirectional ranges, in order, of a prompt of `length` tokens with these units."""
        if self.whole and units:
            return [(0, length)]
        return runs(sorted(place for unit in units if unit["kind"] in self.kinds for place in unit["places"].tolist()))


@dataclass(frozen=True, slots=True)
class MaskProbe:
    """Runs a model that contains encoders and decoder up to its decoder."""

    kind: str
    """The model's class, for errors."""
    inner: nn.Module
    decoder: PreTrainedModel
    processor: Processor
    device: torch.device
    dtype: torch.dtype
    plain: Rows | None = None
    """Computes the rows of text tokens; None: text rows are not checked (the embedding was removed)."""

    def sight(self) -> Sight:
        """Find the bidirectional spans. Raises `ConfigError` for unsupported masks, and for a model in which a medium
        does more than replace the rows of its tokens."""
        found = {kind: self._found(kind) for kind in self.processor.kinds}
        seeing = {kind: what for kind, what in found.items() if set(what.values()) != {CAUSAL}}
        if not seeing:
            return Sight()
        whole = any(WHOLE in what.values() for what in seeing.values())
        first, *others = seeing.values()
        if any(other != first for other in others) or (whole and len(seeing) < len(found)):
            raise self._unserved("the kinds of its media have different attention masks")
        if len(set(first.values())) == 1:
            return Sight(frozenset(seeing), whole, BEYOND in first.values())
        if whole:
            raise self._unserved("its prompts are fully bidirectional in only some of its layers")
        beyond = BEYOND in first.values()
        return Sight(
            frozenset(seeing), beyond=beyond, types=frozenset(name for name, what in first.items() if what != CAUSAL)
        )

    def _found(self, kind: str) -> dict[str, str]:
        """Layer type ("": all) → kind of its mask."""
        text, media = self.processor.examples(kind)
        made = self.processor(text, {kind: media})
        given = self.given(made, kind)
        if self.plain is not None:
            ids, rows = others_rows(made, given["inputs_embeds"][0], kind)
            if not torch.allclose(rows, self.plain(ids, (kind,)), rtol=1e-2, atol=1e-4):
                raise self._unserved(f"a medium ({kind}) changes the rows of other tokens than its own")
        if not inspect.signature(self.inner.forward).parameters.keys() & set(TYPES):
            return {"": CAUSAL}
        both = bidirectional_seen(len(made.ids), runs(made.places(kind)))
        masks = given.get("attention_mask")
        seen = {name: _seen(mask) for name, mask in (masks if isinstance(masks, dict) else {"": masks}).items()}
        found = {name: read_mask(mask, both, self.decoder.config) for name, mask in seen.items()}
        if OTHER in found.values():
            raise self._unserved(
                "it passes attention masks for media to its decoder that are neither causal nor bidirectional spans"
            )
        return found

    def given(self, made: Processed, kind: str) -> dict[str, Any]:
        """The decoder's arguments for a text with media."""
        ids = torch.tensor([made.ids], device=self.device)
        named = {name: made.named_types.get(name, made.token_types) for name in TYPES}
        types = {name: value and torch.tensor([value], device=self.device) for name, value in named.items()}
        tensors = moved(made.tensors[kind], self.device, self.dtype)
        return self._given(ids, {**tensors, **types, "attention_mask": torch.ones_like(ids)}, kind)

    def rows(self, ids: torch.Tensor, made: Processed | None, kind: str) -> torch.Tensor:
        """Rows [n, H] of text ids [n], which follow a text with media if `made` is set."""
        before = torch.tensor([] if made is None else made.ids, dtype=torch.long)
        tensors = {} if made is None else moved(made.tensors[kind], self.device, self.dtype)
        whole = torch.cat([before, ids]).to(self.device)[None]
        given = self._given(whole, {**tensors, "attention_mask": torch.ones_like(whole)}, kind)
        rows: torch.Tensor = given["inputs_embeds"][0, len(before) :]
        return rows

    @torch.inference_mode()
    def _given(self, ids: torch.Tensor, arguments: dict[str, Any], kind: str) -> dict[str, Any]:
        """Ids [1, T] → the decoder's arguments."""
        given: list[dict[str, Any]] = []

        def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            given.append(kwargs)
            raise _AtDecoder

        hook = self.decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.inner(input_ids=ids, use_cache=False, **taken_by(self.inner.forward, arguments))
        except _AtDecoder:
            return given[0]
        except FAILURES as error:
            raise self._unserved(f"its forward does not accept {kind} as its processor returns it ({error})") from error
        finally:
            hook.remove()
        raise self._unserved(f"its forward does not call its decoder for {kind}")

    def _unserved(self, reason: str) -> ConfigError:
        return cannot_be_served(self.kind, reason)


def others_rows(made: Processed, rows: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [n], rows [n, H]) of the text tokens among all rows [T, H] of a text with media."""
    others = torch.ones(len(made.ids), dtype=torch.bool)
    others[made.places(kind)] = False
    others = others.to(rows.device)
    return torch.tensor(made.ids, device=rows.device)[others], rows[others]


def runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions → [start, stop) of consecutive ones."""
    borders = [index for index, (one, other) in enumerate(pairwise(places), 1) if other != one + 1]
    return [(places[begin], places[end - 1] + 1) for begin, end in pairwise([0, *borders, len(places)]) if end > begin]


def bidirectional_seen(length: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """[length, length] bool: causal, but each span is fully visible to itself."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for start, stop in spans:
        seen[start:stop, start:stop] = True
    return seen


def is_causal(mask: torch.Tensor | dict[str, torch.Tensor | None] | None, config: PreTrainedConfig) -> bool:
    """Whether a prompt's masks, by layer type or one for all, are causal or left to the decoder."""
    for one in mask.values() if isinstance(mask, dict) else [mask]:
        seen = _seen(one)
        if one is not None and (seen is None or read_mask(seen, torch.ones_like(seen).tril(), config) != CAUSAL):
            return False
    return True


def read_mask(seen: torch.Tensor | None, both: torch.Tensor, config: PreTrainedConfig) -> str:
    """The kind of a mask [T, T], given `both`: the mask with bidirectional media; None: the decoder makes the mask."""
    if seen is None:
        return CAUSAL
    window: int | None = config.sliding_window if "sliding_window" in config else None
    for near in (torch.ones_like(both), *(() if window is None else (torch.ones_like(both).triu(1 - window),))):
        if torch.equal(seen, near.tril()):
            return CAUSAL
        if torch.equal(seen, both & near):
            return MEDIA
        ahead = both.triu(1)
        if torch.equal(seen, near.tril() | ahead | ahead.T):
            return BEYOND
    return WHOLE if bool(seen.all()) else OTHER


def moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move tensors to the device and cast floating-point ones to the model's dtype, like `BatchFeature.to`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {key: moved(item, device, dtype) for key, item in value.items()}
    return [moved(item, device, dtype) for item in value] if isinstance(value, list) else value


def _seen(mask: torch.Tensor | None) -> torch.Tensor | None:
    """[T, T] bool, true where a query (row) sees a key, from a mask [1, 1, T, T], boolean or additive; None if the
    decoder makes it."""
    if mask is None or mask.ndim != 4:
        return None
    return (mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0).cpu()
