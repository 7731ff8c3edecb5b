"""The flat batch of a step, from the sequences in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter, FlatBatch, Prompt
from segue.engines.autoregressive.jobs import Job, Run
from segue.engines.autoregressive.sequence import Sequence
from segue.kernels.paged_step import HybridStep, PagedStep
from segue.kernels.staging import upload_all
from segue.kernels.state_store import StateStep


class Scheduled(NamedTuple):
    """A sequence with its part in the step."""

    sequence: Sequence
    run: Run


class Newest(NamedTuple):
    """Tokens that were drawn and are not known on the host."""

    tokens: torch.Tensor
    """[n] long"""
    places: Mapping[Job, int]
    """Where in `tokens` the token after its known ones is."""


def flat_batch(
    adapter: AutoregressiveAdapter,
    scheduled: Seq[Scheduled],
    attention: PagedStep | HybridStep,
    newest: Newest | None,
    states: StateStep | None = None,
) -> tuple[torch.Tensor, FlatBatch]:
    """(embeddings [tokens, hidden], the batch). Prompts with embeddings of their own keep them; all other tokens are
    embedded in one call, or two where generated tokens are conditioned. `newest`: where sequences have tokens beyond
    the known ones."""
    ids: list[int] = []
    coming: list[tuple[int, int]] = []
    places: list[np.ndarray] = []
    own: list[tuple[int, torch.Tensor]] = []
    plain: list[tuple[int, int]] = []
    conditioned: list[tuple[int, int, torch.Tensor]] = []
    for sequence, run in scheduled:
        begin = len(ids)
        ids += sequence.tokens(run.start, run.stop)
        if len(ids) < begin + run.tokens:
            assert newest is not None
            coming.append((len(ids), newest.places[run.job]))
            ids.append(0)
        assert len(ids) == begin + run.tokens, "tokens that nobody has drawn"
        places.append(sequence.positions(run.start, run.stop))
        border = min(max(sequence.prompt_length, run.start), run.stop)
        middle = begin + border - run.start
        prompt = sequence.prompt
        assert prompt is not None
        for start, stop, rows in _prompt_pieces(prompt, run.start, border):
            at = begin + start - run.start
            if rows is None:
                plain.append((at, at + stop - start))
            else:
                own.append((at, rows.to(adapter.device)))
        if border < run.stop and adapter.conditioned:
            first = border - sequence.prompt_length
            conditioned.append((middle, len(ids), sequence.conditioning.rows(first, first + run.stop - border)))
        elif border < run.stop:
            plain.append((middle, len(ids)))
    arrays = [np.array(ids), np.concatenate(places, axis=1), np.array(coming, dtype=np.int64).reshape(-1, 2).T]
    token_ids, positions, moves = upload_all(arrays, adapter.device)
    if coming:
        assert newest is not None
        token_ids.index_copy_(0, moves[0], newest.tokens.index_select(0, moves[1]))
    pieces = list(own)
    if plain:
        ranges = [(begin, end) for begin, end in plain]
        pieces += _embed(adapter, token_ids, ranges, None)
    if conditioned:
        ranges = [(begin, end) for begin, end, _ in conditioned]
        pieces += _embed(adapter, token_ids, ranges, torch.cat([rows for _, _, rows in conditioned]))
    pieces.sort(key=lambda piece: piece[0])
    embeds = pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces])
    prompts = [(sequence.prompt, run.start, run.stop) for sequence, run in scheduled]
    return embeds, FlatBatch(token_ids, embeds if own else None, positions, attention, prompts, states)


def _prompt_pieces(prompt: Prompt, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """Tokens [start, stop) of a prompt in pieces, each with its own embeddings; None where its ids are looked up."""
    if prompt.embeds is None:
        if start < stop:
            yield start, stop, None
        return
    for first, last in prompt.looked_up:
        first, last = max(first, start), min(last, stop)
        if first >= last:
            continue
        if start < first:
            yield start, first, prompt.embeds[start:first]
        yield first, last, None
        start = last
    if start < stop:
        yield start, stop, prompt.embeds[start:stop]


def _embed(
    adapter: AutoregressiveAdapter,
    token_ids: torch.Tensor,
    ranges: list[tuple[int, int]],
    rows: torch.Tensor | None,
) -> list[tuple[int, torch.Tensor]]:
    """One call for tokens of several ranges: the pieces, each with its place."""
    sizes = [end - begin for begin, end in ranges]
    if sum(sizes) == len(token_ids):
        return [(0, adapter.embed(token_ids, rows))]
    wanted = torch.cat([token_ids[begin:end] for begin, end in ranges])
    embedded = adapter.embed(wanted, rows).split(sizes)
    return [(begin, piece) for (begin, _), piece in zip(ranges, embedded, strict=True)]
