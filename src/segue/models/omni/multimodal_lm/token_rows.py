"""Compute the rows of text tokens as the model does: the decoder's embedding, with the model's replacements for some
ids; and find the ids that per-layer embeddings see in place of media tokens.

Gemma 3n replaces the rows of ids beyond its text vocabulary by rows of its encoders, wherever they stand; Ovis 2 those
of the tokens around an image, in prompts with an image. If a text with media shows that the rows differ from the
embedding, they are compared id by id.

Decoders that take the ids again for their layers (Gemma 3n, Gemma 4) have no entry for media tokens in the layers'
tables. The id to use instead is found by comparing the model's per-layer inputs with the decoder's own for each
candidate id.

H: hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from segue.models.omni.multimodal_lm.bidirectional import MaskProbe, others_rows
from segue.models.omni.multimodal_lm.processor import Processed
from segue.models.shared.decoder.interface import cannot_be_served
from segue.models.shared.decoder.layer_inputs import takes_ids_again


@torch.inference_mode()
def stand_ins(probe: MaskProbe) -> dict[int, int]:
    """Id of a medium's token → the id that layers see in its place; empty for decoders whose layers take no ids.

    Raises `ConfigError` if no id gives the model's own result.
    """
    decoder = probe.decoder
    of_layers = takes_ids_again(decoder, decoder.config)
    if of_layers is None:
        return {}
    found = {}
    padding = decoder.config.pad_token_id if "pad_token_id" in decoder.config else None
    for kind in probe.processor.kinds:
        text, media = probe.processor.examples(kind)
        made = probe.processor(text, {kind: media})
        token = made.token_ids[kind]
        given = probe.given(made, kind)
        ids = torch.tensor([made.ids], device=probe.device)
        tried = (other for other in dict.fromkeys((padding, 0)) if other is not None)
        for other in tried:
            made_of = of_layers(ids.masked_fill(ids == token, other), given["inputs_embeds"])
            if torch.equal(made_of, given["per_layer_inputs"]):
                found[token] = other
                break
        else:
            raise cannot_be_served(
                probe.kind, f"its layers also take ids, which for {kind} are neither the padding id nor 0"
            )
    return found


_IDS = 16384
"""Number of ids checked in one call."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """Replacement rows of some ids."""

    slots: torch.Tensor
    """[vocab] long: an id's index in `rows`; 0 for ids without a replacement."""
    rows: torch.Tensor
    """[1 + ids, H]; the first is unused."""

    def over(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n] ids with their rows [n, H] → the rows, with replacements applied."""
        slots = self.slots[ids]
        return torch.where((slots > 0)[:, None], self.rows[slots], rows)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Maps ids to rows."""

    embedding: nn.Module
    always: Overlay | None = None
    """Replacements that apply everywhere, in replies as well."""
    with_media: Mapping[str, Overlay] = field(default_factory=lambda: MappingProxyType({}))
    """By kind, further replacements in prompts with media of that kind."""

    def __call__(self, ids: torch.Tensor, kinds: Iterable[str] = ()) -> torch.Tensor:
        """[n] ids, of a prompt with media of these kinds → [n, H]."""
        rows: torch.Tensor = self.embedding(ids)
        for overlay in (self.always, *(self.with_media.get(kind) for kind in sorted(kinds))):
            if overlay is not None:
                rows = overlay.over(ids, rows)
        return rows


@torch.inference_mode()
def token_rows(probe: MaskProbe) -> TokenRows:
    """Find the rows of a model whose embedding is loaded."""
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
    """The ids whose rows differ from `rows`, after a text with media of a kind if `made` is set."""
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
    """All ids except those of media, in chunks."""
    media = [] if made is None else list(made.token_ids.values())
    every = torch.arange(vocabulary)
    yield from every[~torch.isin(every, torch.tensor(media, dtype=torch.long))].split(_IDS)
