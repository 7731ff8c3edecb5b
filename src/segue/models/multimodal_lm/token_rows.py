"""The rows of tokens that are no medium's: the decoder's embedding of their ids, and what some models put over it.

Gemma 3n has rows of its encoders for ids behind those of text, and for them alone, wherever they stand; Ovis 2 for the
tokens around a picture, in prompts that have one. What a model gives its decoder is compared with its embedding, id by
id, where a text with media shows that the two are not one.

H: hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from segue.models.multimodal_lm.mutual import MaskProbe, others_rows
from segue.models.multimodal_lm.processor import Processed

_IDS = 16384
"""Ids in one call while they are looked at."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """Rows of some ids."""

    slots: torch.Tensor
    """[vocab] long: an id's place in `rows`; 0 for ids that have none."""
    rows: torch.Tensor
    """[1 + ids, H]; the first is no id's."""

    def over(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n] ids with their rows [n, H] → these, but for the ids that have one here."""
        slots = self.slots[ids]
        return torch.where((slots > 0)[:, None], self.rows[slots], rows)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Ids → rows."""

    embedding: nn.Module
    always: Overlay | None = None
    """What is over the embedding everywhere, in replies as well."""
    beside: Mapping[str, Overlay] = field(default_factory=lambda: MappingProxyType({}))
    """By kind, what is over these in prompts with media of that kind."""

    def __call__(self, ids: torch.Tensor, kinds: Iterable[str] = ()) -> torch.Tensor:
        """[n] ids, of a prompt with media of these kinds → [n, H]."""
        rows: torch.Tensor = self.embedding(ids)
        for overlay in (self.always, *(self.beside.get(kind) for kind in sorted(kinds))):
            if overlay is not None:
                rows = overlay.over(ids, rows)
        return rows


@torch.inference_mode()
def token_rows(probe: MaskProbe) -> TokenRows:
    """Of a model whose embedding is whole."""
    rows = TokenRows(probe.decoder.get_input_embeddings())
    texts = {}
    for kind in probe.processor.kinds:
        text, media = probe.processor.examples(kind)
        texts[kind] = probe.processor(text, {kind: media})
    if all(_as_given(probe, rows, made, kind) for kind, made in texts.items()):
        return rows
    rows = TokenRows(rows.embedding, _overlay(probe, rows, None, ""))
    return TokenRows(
        rows.embedding,
        rows.always,
        {
            kind: overlay
            for kind, made in texts.items()
            if not _as_given(probe, rows, made, kind) and (overlay := _overlay(probe, rows, made, kind)) is not None
        },
    )


def _as_given(probe: MaskProbe, rows: TokenRows, made: Processed, kind: str) -> bool:
    ids, given = others_rows(made, probe.given(made, kind)["inputs_embeds"][0], kind)
    return bool(torch.allclose(rows(ids), given))


def _overlay(probe: MaskProbe, rows: TokenRows, made: Processed | None, kind: str) -> Overlay | None:
    """Where the rows of ids, behind a text with media of a kind if there is one, are others."""
    vocabulary = probe.decoder.get_input_embeddings().weight.shape[0]
    slots = torch.zeros(vocabulary, dtype=torch.long, device=probe.device)
    found: list[torch.Tensor] = []
    for ids in _ids(vocabulary, made):
        given = probe.rows(ids, made, kind)
        ids = ids.to(probe.device)
        own = (given != rows(ids)).any(-1)
        slots[ids[own]] = torch.arange(int(own.sum()), device=probe.device) + 1 + sum(len(some) for some in found)
        found.append(given[own])
    every = torch.cat(found)
    return Overlay(slots, torch.cat([every.new_zeros(1, every.shape[1]), every])) if len(every) else None


def _ids(vocabulary: int, made: Processed | None) -> Iterator[torch.Tensor]:
    """All ids but those of media, where there are any; some at a time."""
    media = [] if made is None else list(made.token_ids.values())
    every = torch.arange(vocabulary)
    yield from every[~torch.isin(every, torch.tensor(media, dtype=torch.long))].split(_IDS)
