"""Which tokens of a prompt see each other in both directions: read off the masks that the model gives its decoder.

A model that has such tokens (a picture's, in Gemma 3) says so in the masks its forward makes of the processor's token
types. Here the forward is run up to the decoder, over a text with two media of a kind, and its masks are compared with
those that the engine does: causal; causal but for each run of media tokens, which sees all of itself; either of them
within a sliding window; and all tokens of a prompt seeing each other (PaliGemma). On the way it is seen whether media
change the rows of other tokens than their own.
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
from segue.models.interface import cannot_be_served
from segue.models.library import PreTrainedConfig, PreTrainedModel
from segue.models.multimodal_lm.loading import taken_by
from segue.models.multimodal_lm.processor import TYPES, Processed, Processor

CAUSAL, MEDIA, BEYOND, WHOLE, OTHER = "causal", "media", "beyond", "whole", "other"
"""What a mask was found to be."""


FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, StopIteration)
"""What a forward raises that wants more, or other things, than placeholders and what the processor made."""


Rows = Callable[[torch.Tensor, Iterable[str]], torch.Tensor]
"""Ids [n] of a prompt with media of some kinds → their rows [n, H]."""


class _AtDecoder(Exception):
    """The decoder was called."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Which tokens of a prompt with media see each other in both directions."""

    kinds: frozenset[str] = frozenset()
    """Of media: the tokens of each run of theirs."""
    whole: bool = False
    """All tokens of the prompt, text as well."""
    beyond: bool = False
    """They do so beyond a window, too: a medium that is longer than one is not taken."""
    types: frozenset[str] = frozenset()
    """Of the layers in which they do; empty: in all."""

    def layers(self, config: PreTrainedConfig) -> frozenset[int]:
        """The layers of a decoder of this config in which they do. Raises `ConfigError` where it does not say."""
        if not self.kinds:
            return frozenset()
        if not self.types:
            return frozenset(range(config.num_hidden_layers))
        types: list[str] = (config.layer_types if "layer_types" in config else None) or []
        if not self.types <= set(types):
            raise cannot_be_served(
                config.model_type,
                f"tokens of {', '.join(sorted(self.kinds))} see each other in both directions in layers of type "
                f"{', '.join(sorted(self.types))}, and its config does not say which those are",
            )
        return frozenset(layer for layer, name in enumerate(types) if name in self.types)

    def spans(self, units: Sequence[Mapping[str, Any]], length: int) -> list[tuple[int, int]]:
        """The ranges of tokens, in order, of a prompt of so many tokens with these units."""
        if self.whole and units:
            return [(0, length)]
        return runs(sorted(place for unit in units if unit["kind"] in self.kinds for place in unit["places"].tolist()))


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
    plain: Rows | None = None
    """The rows of tokens that are no medium's; None: they are not looked at (the embedding was forgotten)."""

    def sight(self) -> Sight:
        """Which tokens see each other. Raises `ConfigError` for other masks, and for a model in which a medium is more
        than rows in the places of its tokens."""
        found = {kind: self._found(kind) for kind in self.processor.kinds}
        seeing = {kind: what for kind, what in found.items() if set(what.values()) != {CAUSAL}}
        if not seeing:
            return Sight()
        whole = any(WHOLE in what.values() for what in seeing.values())
        first, *others = seeing.values()
        if any(other != first for other in others) or (whole and len(seeing) < len(found)):
            raise self._unserved("tokens of one kind of its media see each other otherwise than those of another")
        if len(set(first.values())) == 1:
            return Sight(frozenset(seeing), whole, BEYOND in first.values())
        if whole:
            raise self._unserved("all tokens of its prompts see each other in some of its layers only")
        beyond = BEYOND in first.values()
        return Sight(
            frozenset(seeing), beyond=beyond, types=frozenset(name for name, what in first.items() if what != CAUSAL)
        )

    def _found(self, kind: str) -> dict[str, str]:
        """By type of layer ("": all), what its mask is."""
        text, media = self.processor.examples(kind)
        made = self.processor(text, {kind: media})
        given = self.given(made, kind)
        if self.plain is not None:
            ids, rows = others_rows(made, given["inputs_embeds"][0], kind)
            if not torch.allclose(rows, self.plain(ids, (kind,)), rtol=1e-2, atol=1e-4):
                raise self._unserved(f"a medium ({kind}) changes the rows of other tokens than those in its places")
        if not inspect.signature(self.inner.forward).parameters.keys() & set(TYPES):
            return {"": CAUSAL}
        both = mutual_seen(len(made.ids), runs(made.places(kind)))
        masks = given.get("attention_mask")
        seen = {name: _seen(mask) for name, mask in (masks if isinstance(masks, dict) else {"": masks}).items()}
        found = {name: read_mask(mask, both, self.decoder.config) for name, mask in seen.items()}
        if OTHER in found.values():
            raise self._unserved(
                "it gives its decoder masks of its own for media, which are neither causal nor so within"
            )
        return found

    def given(self, made: Processed, kind: str) -> dict[str, Any]:
        """What the decoder is given of a text with media."""
        ids = torch.tensor([made.ids], device=self.device)
        named = {name: made.named_types.get(name, made.token_types) for name in TYPES}
        types = {name: value and torch.tensor([value], device=self.device) for name, value in named.items()}
        tensors = moved(made.tensors[kind], self.device, self.dtype)
        return self._given(ids, {**tensors, **types, "attention_mask": torch.ones_like(ids)}, kind)

    def rows(self, ids: torch.Tensor, made: Processed | None, kind: str) -> torch.Tensor:
        """[n] ids of tokens that are no medium's, behind a text with media if there is one → [n, H]: their rows."""
        before = torch.tensor([] if made is None else made.ids, dtype=torch.long)
        tensors = {} if made is None else moved(made.tensors[kind], self.device, self.dtype)
        whole = torch.cat([before, ids]).to(self.device)[None]
        given = self._given(whole, {**tensors, "attention_mask": torch.ones_like(whole)}, kind)
        rows: torch.Tensor = given["inputs_embeds"][0, len(before) :]
        return rows

    @torch.inference_mode()
    def _given(self, ids: torch.Tensor, arguments: dict[str, Any], kind: str) -> dict[str, Any]:
        """[1, T] → what the decoder is given."""
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
            raise self._unserved(f"its forward does not take {kind} as its processor makes it ({error})") from error
        finally:
            hook.remove()
        raise self._unserved(f"its forward does not come to its decoder with {kind}")

    def _unserved(self, reason: str) -> ConfigError:
        return cannot_be_served(self.kind, reason)


def others_rows(made: Processed, rows: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [n], their rows [n, H]) of the tokens of a text that are no medium's, out of all its rows [T, H]."""
    others = torch.ones(len(made.ids), dtype=torch.bool)
    others[made.places(kind)] = False
    others = others.to(rows.device)
    return torch.tensor(made.ids, device=rows.device)[others], rows[others]


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


def is_causal(mask: torch.Tensor | dict[str, torch.Tensor | None] | None, config: PreTrainedConfig) -> bool:
    """Whether masks of a prompt, by type of layer or one for all, leave all to the decoder, or are causal."""
    for one in mask.values() if isinstance(mask, dict) else [mask]:
        seen = _seen(one)
        if one is not None and (seen is None or read_mask(seen, torch.ones_like(seen).tril(), config) != CAUSAL):
            return False
    return True


def read_mask(seen: torch.Tensor | None, both: torch.Tensor, config: PreTrainedConfig) -> str:
    """What a mask [T, T] is, where tokens of media would see each other by `both`; None: the decoder makes it."""
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
    """Tensors on the device, numbers with a point in the model's type, as `BatchFeature.to` does."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {key: moved(item, device, dtype) for key, item in value.items()}
    return [moved(item, device, dtype) for item in value] if isinstance(value, list) else value


def _seen(mask: torch.Tensor | None) -> torch.Tensor | None:
    """[T, T] bool, true where a query (row) sees a key, of a mask [1, 1, T, T], boolean or additive; None where the
    decoder is left to make it."""
    if mask is None or mask.ndim != 4:
        return None
    return (mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0).cpu()
